"""Training of draft heads: answers of the target, the training-time test, and a head that other engines load too."""
