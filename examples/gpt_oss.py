"""GPT-OSS: a bias on the gate, the best four logits first, then a softmax over those four.

Unlike a selection bias, the gate's bias is a learned part of the logits: it moves the weights and gets a gradient. Run
it with ``python examples/gpt_oss.py``.
"""

import torch

import moesaic as mo

router = mo.Router(num_experts=128, top_k=4, score="softmax", order="topk_then_score", gate_bias=True)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.randn(4, 128, device=device)
    gate_bias = torch.zeros(128, device=device, requires_grad=True)

    route = mo.compile(router)
    r = route(logits, gate_bias=gate_bias)
    r.weights[:, 0].sum().backward()

    print(f"backend {route.backend}: 4 tokens, 128 experts")
    print("token  expert:weight")
    for token, (experts, weights) in enumerate(zip(r.indices.tolist(), r.weights.tolist())):
        print(f"{token:5}  " + "  ".join(f"{e:3}:{w:.3f}" for e, w in zip(experts, weights)))
    print(f"the gate bias has a gradient at {int(gate_bias.grad.count_nonzero())} experts: those picked by some token")


if __name__ == "__main__":
    main()
