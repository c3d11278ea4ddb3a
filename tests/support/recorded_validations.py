"""The first and a later validation of two runs of `dance_grpo` on the tiny world, without the prefix validation/.

PLAIN is a run with --sampler.shift 3, seed 100, after 48 steps. HACKED has the distances of the run of
tests/run/guards/test_hacking_monitor.py after 8 steps, whose scorer of saturation makes shapes grow; its reward and
saturation are round numbers.
"""

PLAIN = (
    {
        "reward": 3.532,
        "reward_std": 1.583,
        "pixels/saturation": 0.1107,
        "pixels/saturation_std": 0.01141,
        "pixels/diversity": 0.08543,
        "world/color": 0.08216,
        "world/shape": 0.7561,
        "world/size": 0.7972,
        "world/place": 0.7246,
        "world/travel": 1.601,
        "world/diversity": 0.9083,
    },
    {
        "reward": 4.488,
        "reward_std": 1.027,
        "pixels/saturation": 0.1132,
        "pixels/saturation_std": 0.01095,
        "pixels/diversity": 0.07231,
        "world/color": 0.03227,
        "world/shape": 0.6459,
        "world/size": 0.7563,
        "world/place": 0.7923,
        "world/travel": 1.685,
        "world/diversity": 0.6942,
    },
)
HACKED = (
    {
        "reward": 2.0,
        "reward_std": 1.0,
        "pixels/saturation": 0.111,
        "pixels/saturation_std": 0.012,
        "world/color": 0.11,
        "world/size": 0.97,
        "world/travel": 1.63,
    },
    {
        "reward": 5.0,
        "reward_std": 1.0,
        "pixels/saturation": 0.14,
        "pixels/saturation_std": 0.012,
        "world/color": 0.03,
        "world/size": 2.40,
        "world/travel": 2.99,
    },
)
