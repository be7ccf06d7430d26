"""Real hosts on one Linux machine, and a real Slurm on them: namespaces, an sshd each, a cable each."""
