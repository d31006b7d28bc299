"""What runs on simulated hosts: the real managers and the real client, devices, and the processes of workers."""
