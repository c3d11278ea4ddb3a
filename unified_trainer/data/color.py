"""HDR and wide gamuts to BT.709 of 8 bits, by the formulas of docs/data.md; curves and primaries are numbers of H.273.

light   HLG E / .265 (scene light, BT.2100; white has the signal .75, BT.2408); PQ F / 100 cd/m2 (display light)
signal  s = 1.099 light^.45 - .099 (BT.709), for PQ light^(1 / 2.4) (BT.1886), after the matrix to BT.709
tone    s up to .75; then .75 + .25 t (1 + t / T^2) / (1 + t) with t = (s - .75) / .25; T is the t of the clip's peak
"""

import numpy as np

PQ, HLG = 16, 18
BT2020 = ((1.6605, -0.5876, -0.0728), (-0.1246, 1.1329, -0.0083), (-0.0182, -0.1006, 1.1187))  # BT.2087
WIDE = {9: BT2020, 12: ((1.2249, -0.2247, 0.0), (-0.0420, 1.0419, 0.0), (-0.0196, -0.0786, 1.0979))}  # 12: P3


def to_sdr(frames: np.ndarray, transfer: int, primaries: int) -> np.ndarray:
    """Convert the signals [t, h, w, 3] uint16 of a clip; HLG and PQ without primaries have BT.2020's."""
    hdr = transfer in (HLG, PQ)
    gamut = np.float32(WIDE.get(9 if hdr and primaries == 2 else primaries, np.eye(3)))
    light = _light(np.linspace(0, 1, 2**16), transfer).astype(np.float32)

    def signal(frame: np.ndarray) -> np.ndarray:
        x = np.maximum(light[frame] @ gamut.T, 0)
        return x ** (1 / 2.4) if transfer == PQ else np.where(x < 0.018, 4.5 * x, 1.099 * x**0.45 - 0.099)

    brightest = [signal(frame[::4, ::4]).max(-1) for frame in frames]
    peak = max(1.0, float(np.quantile(brightest, 0.95))) if hdr else 1.0
    return np.stack([(_tone(signal(frame), peak) * 255).round().astype(np.uint8) for frame in frames])


def _tone(signal: np.ndarray, peak: float) -> np.ndarray:
    above, most = np.maximum(signal - 0.75, 0) / 0.25, (peak - 0.75) / 0.25
    return np.minimum(np.minimum(signal, 0.75) + 0.25 * above * (1 + above / most**2) / (1 + above), 1)


def _light(signal: np.ndarray, transfer: int) -> np.ndarray:
    if transfer == HLG:
        a = 0.17883277
        b, c = 1 - 4 * a, 0.5 - a * np.log(4 * a)
        return np.where(signal <= 0.5, signal**2 / 3, (np.exp((signal - c) / a) + b) / 12) / 0.265
    if transfer == PQ:
        root = signal ** (32 / 2523)
        return 100 * (np.maximum(root - 107 / 128, 0) / (2413 / 128 - 2392 / 128 * root)) ** (8192 / 1305)
    return np.where(signal < 0.081, signal / 4.5, ((signal + 0.099) / 1.099) ** (1 / 0.45))
