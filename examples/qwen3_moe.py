"""Qwen3-MoE: softmax over 128 experts, the best eight, their weights divided by their sum.

Without the division (the model's `norm_topk_prob`) a gradient reaches all 128 logits of a token, through the softmax.
With it only the differences between the picks matter, and the other 120 get none. Run it with
``python examples/qwen3_moe.py``.
"""

import torch

import moesaic as mo

router = mo.Router(num_experts=128, top_k=8, score="softmax", renormalize=True)
not_divided = mo.Router(num_experts=128, top_k=8, score="softmax")


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.randn(3, 128, device=device, requires_grad=True)

    print("divided  token  logits reached  expert:weight")
    for divided, declared in (("yes", router), ("no", not_divided)):
        r = mo.compile(declared)(logits)
        (gradient,) = torch.autograd.grad(r.weights[:, 0].sum(), logits)
        reached = (gradient.abs() > 1e-6).sum(-1)
        for token, (experts, weights) in enumerate(zip(r.indices.tolist(), r.weights.tolist())):
            picks = "  ".join(f"{e:3}:{w:.3f}" for e, w in zip(experts, weights))
            print(f"{divided:7}  {token:5}  {int(reached[token]):14}  {picks}")


if __name__ == "__main__":
    main()
