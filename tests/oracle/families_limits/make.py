"""Makes the fixtures beside it: layers of families whose experts have limits of their own, and of
families that came with them.

    python make.py [NAME…]      makes those, or all

The cases run through ../families/make.py. Made with transformers 5.24 and torch on the CPU, in f32.
"""

import pathlib
import sys

import torch

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "families"))

import make as families  # noqa: E402

V2 = dict(**families.NARROW, n_routed_experts=6, num_experts_per_tok=3)
STEP = dict(
    **V2, **families.SPARSE, share_expert_dim=10, moe_router_scaling_factor=3.0, pad_token_id=1
)


def step(name, **limits):
    """A layer of Step 3.7 whose second layer has these limits."""
    return families.nested("step3p7", "Step3p7", dict(**STEP, **limits), name=name)


def run_inkling(model, case, x):
    """The block, with its shared experts as the last ones of the router."""
    y, ids = families.run_block(model, case, x)
    gate = model.get_submodule(case.block).gate
    shared = torch.arange(gate.num_experts, gate.n_total_experts).expand(len(ids), -1)
    return y, torch.cat([ids, shared], dim=1)


families.HERE = HERE
families.CASES = [
    families.decoder("hy_v4", "HYV4", **V2, **families.SPARSE, swiglu_limit=0.8),
    families.nested("hy_v4_vl", "HYV4VL", dict(**V2, **families.SPARSE, swiglu_limit=0.9)),
    families.nested(
        "inkling", "Inkling", dict(**V2, n_shared_experts=2, route_scale=2.5),
        vision_config=dict(text_hidden_size=16), audio_config=dict(text_hidden_size=16),
        run=run_inkling,
    ),
    families.nested(
        "inkling2", "Inkling2", dict(**V2, mlp_gate_softcap=0.9, mlp_up_softcap=0.7),
        vision_config=dict(text_hidden_size=16),
    ),
    families.nested(
        "inkling2_loop", "Inkling2Loop", dict(**V2, mlp_gate_softcap=0.8, mlp_up_softcap=0.9),
        vision_config=dict(text_hidden_size=16),
    ),
    families.decoder("lara_mini", "LaraMini", **families.E6, shared_expert_intermediate_size=10),
    step("step3p7_limits", swiglu_limits=[0, 0.4], swiglu_limits_shared=[0, 0.9]),
    step("step3p7_shared", swiglu_limits_shared=[None, 0.5]),
]

if __name__ == "__main__":
    families.main()
