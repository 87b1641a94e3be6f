"""Weight sync: the transaction that carries a policy version from the learner to every generator."""
