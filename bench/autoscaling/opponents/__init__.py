"""Whom the policy is compared with: published scaling rules, the best constant counts, and a clairvoyant schedule."""
