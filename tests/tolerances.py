"""Every tolerance of the suite, in one table (DESIGN §8)."""

from __future__ import annotations

# Float32 on a CPU, packed pass against engine, plain forward and brute force, in nats.
LOGP = 1e-5
# Logits of one next token; they are of order 10, log-probabilities of order 1.
LOGITS = 3e-5
# Relative norm of the difference of one tensor's gradient.
GRAD_LORA = 2e-5
GRAD_OTHER = 1e-4
# What must not move does not move at all.
EXACT = 0.0
# Mean estimate of the rollout-training KL before any update.
KL_CPU = 1e-8
# A float64 reference against another one.
FLOAT64 = 1e-10
# Parameters after three optimizer steps, packed against one row per branch (case PC-18).
AFTER_STEPS = 1e-6
