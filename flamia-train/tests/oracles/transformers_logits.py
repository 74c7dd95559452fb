"""What transformers makes of an exported folder; run by tests/transformers.rs.

    transformers_logits.py FOLDER QUESTION.json ANSWER.json

QUESTION: {"tokens": [...], "text": "..."}. ANSWER: logits of the tokens in the folder's own type and
computed in float32, the ids of the text and what they decode to. FOLDER/again gets the model as
transformers saves it, in several files.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, question, answer = sys.argv[1:]
with open(question) as file:
    question = json.load(file)
tokens = torch.tensor([question["tokens"]])


def logits(model):
    with torch.no_grad():
        return model.eval()(tokens).logits[0].float().tolist()


own, loading = AutoModelForCausalLM.from_pretrained(
    folder, dtype="auto", output_loading_info=True
)
wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = tokenizer(question["text"])["input_ids"]
own.save_pretrained(folder + "/again", max_shard_size="40KB")
tokenizer.save_pretrained(folder + "/again")
with open(answer, "w") as file:
    json.dump(
        {
            "type": str(own.dtype),
            "missing": sorted(loading["missing_keys"]),
            "unexpected": sorted(loading["unexpected_keys"]),
            "logits": logits(own),
            "float32_logits": logits(wide),
            "ids": ids,
            "decoded": tokenizer.decode(ids, skip_special_tokens=True),
            "bos": own.config.bos_token_id,
            "eos": own.generation_config.eos_token_id,
        },
        file,
    )
