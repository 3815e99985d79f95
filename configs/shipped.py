# SPDX-License-Identifier: Apache-2.0
"""The adapter that comes with bfm: controller and reader of SmolLM2-135M-Instruct, learned here.

    python launch/sft.py --config configs/shipped.py --workdir runs/shipped

makes labels (Sal_q of every turn), trains, measures on users apart, and leaves adapter.safetensors,
which is bfm/policy.safetensors. The focus is the evidence of shifting_prefs, which follows from how its
histories are made: an untrained model of this size judges evidence too badly to label it.

47 minutes of one core. On 75 questions of sixteen users that it has not seen, by

    python launch/eval.py --config configs/smollm2_135m.py --workdir runs/quality/shipped \\
        --config.policy=shipped --config.data=shifting_prefs --config.split=small_dev \\
        --config.eval.sal_a=false --config.methods=bfm,bfm_open,tau_q,none,evidence \\
        --config.eval.contrasts=bfm-tau_q,bfm-none,evidence-none,bfm_open-tau_q,bfm_open-none

accuracy is 0.35 [0.26, 0.43] without memory, 0.68 [0.55, 0.79] with the evidence, 0.44 [0.35, 0.53]
with what the controller reads, 0.51 [0.39, 0.61] with its gate held open, 0.35 [0.28, 0.42] with the
turns of Sal_q above 0, 4.7 of them a question. The controller opens for 43 of the 57 questions with
evidence and 9 of the 18 others, and always reads the first turn by Sal_q.

Predicted for 240 questions (33 of them held out) and 72 updates, written before it was run, when 108
and 36 gave a controller that always opens (0.43 [0.34, 0.51]; evidence 0.61 [0.52, 0.71]): it still
reads the first turn (so it is), closes for some (so it is), accuracy within 5 points of those 0.43
(0.44), evidence 0.6 to 0.75 (0.68), and its probability of opening tells questions with evidence from
the others with an area over 0.7: wrong, 0.64 [0.48, 0.79].
"""

from bfm.settings import default_config


def get_config():
    config = default_config()
    config.data = "shifting_prefs"
    config.split = "train"
    config.limit = 240
    config.label.source = "evidence"
    config.train.steps = 72
    config.train.lora_rank = 4  # a file of 2.5 MB
    config.train.lora_alpha = 8.0
    config.train.learning_rate = 1e-3
    config.train.batch_size = 8
    config.train.accumulation = 4
    config.train.tokens = 1024
    config.train.remat = False
    config.train.dev = 0.1
    config.train.checkpoint_every = 24
    return config
