"""What a device can do at best: dense BF16 products, without the factor two of sparsity.

Figures are the makers' data sheets and architecture white papers (A100 2020, Ada 2022, H100 2022,
H200 2023, GB200 and HGX B200 2024, GB300, HGX B300 and RTX Blackwell 2025), where a sheet prints
only the sparse figure half of it, and with FP32 accumulation, which training uses: on GeForce that
is half of the FP16 figure. A name that is not here, as a laptop's or a part of a GPU (MIG), has no
peak: a wrong denominator is worse than none.
"""

import re

# Of `torch.cuda.get_device_name`, in full: 10^12 operations a second.
_BF16_DENSE = (
    (r"NVIDIA A100-(SXM4|PCIE|PG\d+)-\d+GB|NVIDIA A100 80GB PCIe|NVIDIA A800.*", 312.0),
    (r"NVIDIA A30", 165.0),
    (r"NVIDIA A40|NVIDIA RTX A6000", 149.7),
    (r"NVIDIA A10", 125.0),
    (r"NVIDIA L4", 121.0),
    (r"NVIDIA L40", 181.05),
    (r"NVIDIA L40S", 362.05),
    (r"NVIDIA H100 PCIe", 756.5),
    (r"NVIDIA H100 NVL|NVIDIA H200 NVL", 835.5),
    (r"NVIDIA H100( 80GB HBM3| SXM5.*)?|NVIDIA H800|NVIDIA H200|NVIDIA GH200 .*", 989.4),
    (r"NVIDIA H20", 148.0),
    (r"NVIDIA B200|NVIDIA B300.*", 2250.0),
    (r"NVIDIA GB200|NVIDIA GB300", 2500.0),
    (r"NVIDIA RTX 6000 Ada Generation", 364.2),
    (r"NVIDIA RTX PRO 6000 Blackwell (Workstation|Server) Edition", 503.8),
    (r"NVIDIA GeForce RTX 3090", 71.0),
    (r"NVIDIA GeForce RTX 3090 Ti", 80.0),
    (r"NVIDIA GeForce RTX 4090", 165.2),
    (r"NVIDIA GeForce RTX 4080", 97.5),
    (r"NVIDIA GeForce RTX 5090", 209.5),
    (r"NVIDIA GeForce RTX 5080", 112.6),
)


def peak_flops(device_name: str) -> float | None:
    """Return the dense BF16 operations a second of a device; `None` where they are not known.

    Args:
        device_name: As `torch.cuda.get_device_name` gives it.
    """
    for pattern, teraflops in _BF16_DENSE:
        if re.fullmatch(pattern, device_name):
            return teraflops * 1e12
    return None
