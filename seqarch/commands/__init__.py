"""What each command of ``seqarch`` does; each module offers ``run(name, arguments)``."""
