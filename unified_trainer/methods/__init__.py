"""One file per algorithm; each yields losses."""

METHODS = {  # as text: `registry.method_named` imports the one that is asked for
    "awm": "unified_trainer.methods.awm:AWM",
    "consistency": "unified_trainer.methods.consistency:Consistency",
    "crd": "unified_trainer.methods.crd:CRD",
    "dance_grpo": "unified_trainer.methods.dance_grpo:DanceGRPO",
    "dance_ppo": "unified_trainer.methods.dance_ppo:DancePPO",
    "diffusion_nft": "unified_trainer.methods.diffusion_nft:DiffusionNFT",
    "distill_rl": "unified_trainer.methods.distill_rl:DistillRL",
    "dmd2": "unified_trainer.methods.dmd2:DMD2",
    "finetune": "unified_trainer.methods.finetune:Finetune",
    "flow_dpo": "unified_trainer.methods.flow_dpo:FlowDPO",
    "flow_map": "unified_trainer.methods.flow_map:FlowMap",
    "long_self_forcing": "unified_trainer.methods.long_self_forcing:LongSelfForcing",
    "ode_init": "unified_trainer.methods.ode_init:ODEInit",
    "online_dpo": "unified_trainer.methods.flow_dpo:OnlineDPO",
    "rcm": "unified_trainer.methods.rcm:RCM",
    "reward_gradient": "unified_trainer.methods.reward_gradient:RewardGradient",
    "self_forcing": "unified_trainer.methods.self_forcing:SelfForcing",
    "streaming_tuning": "unified_trainer.methods.streaming_tuning:StreamingTuning",
}
