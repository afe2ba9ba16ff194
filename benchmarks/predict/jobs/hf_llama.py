"""Fine-tuning of a Llama of transformers with adapters of peft and checkpointing, then generation."""

from __future__ import annotations

import torch
from job import arguments, count
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

options = arguments(batch_size=4)
config = LlamaConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=12,
    num_attention_heads=32,
    num_key_value_heads=4,
)
with torch.device("cuda"):
    model = LlamaForCausalLM(config).to(torch.bfloat16)
model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
model.enable_input_require_grads()
model.gradient_checkpointing_enable()
model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for step in count(options.steps):
    tokens = torch.randint(32000, (options.batch_size, (1024, 512, 768, 1536)[step % 4])).cuda()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
with torch.inference_mode():
    model.generate(input_ids=tokens[:, :256], max_new_tokens=16, do_sample=False, pad_token_id=0)
