"""What tests share: fixtures of real parts, scripted servers, clients, drawn conversations and checks."""
