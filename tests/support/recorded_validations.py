"""The first and a later validation of two runs of `dance_grpo` on the tiny world, without the prefix validation/.

PLAIN is a run with --sampler.shift 3, seed 100, after 48 steps. HACKED is that of
tests/run/guards/test_hacking_monitor.py, whose scorer of saturation makes shapes grow, after 8 steps.
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
        "reward": 14.17,
        "reward_std": 2.739,
        "accuracy": 0.1667,
        "accuracy_std": 0.3807,
        "pixels/saturation": 0.1105,
        "pixels/saturation_std": 0.01155,
        "world/color": 0.1138,
        "world/shape": 0.824,
        "world/size": 0.9645,
        "world/place": 1.018,
        "world/travel": 1.633,
    },
    {
        "reward": 17.3,
        "reward_std": 2.099,
        "accuracy": 0.4167,
        "accuracy_std": 0.5036,
        "pixels/saturation": 0.1476,
        "pixels/saturation_std": 0.01261,
        "world/color": 0.0292,
        "world/shape": 0.7992,
        "world/size": 2.395,
        "world/place": 1.237,
        "world/travel": 2.99,
    },
)
