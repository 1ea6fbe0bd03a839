"""Example jobs: real work on real files. Run them with: thunderagent run jobs"""
