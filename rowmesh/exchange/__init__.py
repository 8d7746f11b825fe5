"""How rows and gradients move between ranks: route, then fetch and push over a transport."""
