"""What run_suite.py's --impl is given: puts libfsdp in the place of torch's own, in every process of the suite."""


def install(_torch_fsdp):
    import libfsdp

    libfsdp.install()
