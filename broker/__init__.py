"""The rollout buffer: messages, the contract, the ledger's rules, and the ZeroMQ and Redis backends."""
