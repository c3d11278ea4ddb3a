"""Serve the package hpsv3 1.0.0 from an environment of its own, to runs with the scorer http (docs/rewards.md).

python serve_hpsv3.py HPSv3.safetensors PORT DEVICE
"""

import base64
import json
import sys
import traceback
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
from hpsv3 import HPSv3RewardInferencer
from PIL import Image

TYPES = {"float32": ("<f4", 255), "uint8": ("u1", 1)}  # of the numbers, and what brings them to 8 bits


def score(request):
    """Return the mean score over frames of every video in a request."""
    sent = request["videos"]
    dtype, to_bytes = TYPES[sent["encoding"]]
    videos = np.frombuffer(base64.b64decode(sent["data"]), dtype).reshape(sent["shape"])
    frames = (videos * to_bytes).round().astype("u1").transpose(0, 2, 3, 4, 1)
    images = [Image.fromarray(frame) for video in frames for frame in video]
    prompts = [prompt for prompt in request["prompts"] for _ in range(frames.shape[1])]
    return model.reward(images, prompts)[:, 0].float().reshape(frames.shape[:2]).mean(1).tolist()


class Handler(BaseHTTPRequestHandler):
    def answer(self, code, value):
        body = json.dumps(value).encode() if code == 200 else value.encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(200, {"name": "hpsv3-1.0.0", "protocol": 1, "min_frames": 1})

    def do_POST(self):
        try:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(200, {"scores": score(request)})
        except Exception:  # noqa: BLE001 - the client ends with it
            self.answer(500, traceback.format_exc())


checkpoint, port, device = sys.argv[1:]
model = HPSv3RewardInferencer(checkpoint_path=checkpoint, device=device)
with HTTPServer(("127.0.0.1", int(port)), Handler) as server:
    sys.stdout.write(f"serving at http://127.0.0.1:{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()
