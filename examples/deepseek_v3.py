"""DeepSeek-V3: sigmoid scores, a bias that only selects, eight groups of experts of which four may be picked from.

The bias balances the load from outside: raise it for an expert with too few tokens. It never reaches the weights, and
it gets no gradient. Run it with ``python examples/deepseek_v3.py``.
"""

import torch

import moesaic as mo

router = mo.Router(
    num_experts=256,
    top_k=8,
    score="sigmoid",
    selection_bias=True,
    groups=8,
    groups_kept=4,
    group_score="sum_top2",  # a group is as good as its two best experts together
    renormalize=True,
    renorm_eps=1e-20,
    scale=2.5,
)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.randn(4, 256, dtype=torch.bfloat16, device=device)
    bias = 0.1 * torch.randn(256, device=device)

    route = mo.compile(router)
    r = route(logits, bias=bias)

    print(f"backend {route.backend}: 4 tokens, 256 experts in 8 groups")
    print("token  groups   expert:weight")
    for token, (experts, weights) in enumerate(zip(r.indices.tolist(), r.weights.tolist())):
        groups = ",".join(str(g) for g in sorted({e // 32 for e in experts}))
        print(f"{token:5}  {groups:7}  " + "  ".join(f"{e:3}:{w:.3f}" for e, w in zip(experts, weights)))


if __name__ == "__main__":
    main()
