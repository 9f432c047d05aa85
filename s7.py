# options accepted without effect, on policy
import re
src = open("/work/main/xtk/training/on_policy_loop.py").read()+open("/work/main/xtk/training/runs/on_policy.py").read()
print("teacher_block_steps read by on-policy runs:", "teacher_block_steps" in src)
