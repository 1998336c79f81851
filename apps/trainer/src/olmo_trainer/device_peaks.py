"""What a device can do at best: dense BF16 products, without the factor two of sparsity.

Figures are the makers', where a sheet prints only the sparse figure half of it, and with FP32
accumulation, which training uses: on GeForce that is half of the FP16 figure. Each was held beside
a second source, which its line names (2026-12-01). A name that is not here, as a laptop's, a part
of a GPU (MIG) or a card of another clock, has no peak: a wrong denominator is worse than none.
"""

import re

# Of `torch.cuda.get_device_name`, in full: 10^12 operations a second.
_BF16_DENSE = (
    # Ampere. A100, A30 and A10: data sheets (A100 in torchtitan, tools/utils.py; A10 in Lightning,
    # fabric/utilities/throughput.py). A40: data sheet, 299.4 sparse. RTX A6000: NVIDIA's Ada
    # professional white paper 1.1, 309.7 sparse.
    (r"NVIDIA A100-(SXM4|PCIE|PG\d+)-\d+GB|NVIDIA A100 80GB PCIe|NVIDIA A800.*", 312.0),
    (r"NVIDIA A30", 165.0),
    (r"NVIDIA A40", 149.7),
    (r"NVIDIA RTX A6000", 154.8),
    (r"NVIDIA A10", 125.0),
    # Ada. Data sheets: L4 242, L40 362.1 and L40S 733 sparse (L40S in torchtitan). RTX 6000 Ada:
    # the white paper above, 728.5 sparse.
    (r"NVIDIA L4", 121.0),
    (r"NVIDIA L40", 181.05),
    (r"NVIDIA L40S", 362.05),
    (r"NVIDIA RTX 6000 Ada Generation", 364.2),
    # Hopper. H100 data sheet: 1979, PCIe 1513, NVL 1671 sparse; H200: 1979, NVL 1671; H20: 148
    # (all but the H200 NVL in torchtitan).
    (r"NVIDIA H100 PCIe", 756.5),
    (r"NVIDIA H100 NVL|NVIDIA H200 NVL", 835.5),
    (r"NVIDIA H100( 80GB HBM3| SXM5.*)?|NVIDIA H800|NVIDIA H200|NVIDIA GH200 .*", 989.4),
    (r"NVIDIA H20", 148.0),
    # Blackwell. NVIDIA's data sheet of HGX B200 (4500 sparse) and GB200 NVL72 (5000 sparse, at a
    # higher power); B300 and GB300 differ in FP4 alone (torchtitan, pull request 2884).
    (r"NVIDIA B200|NVIDIA B300.*", 2250.0),
    (r"NVIDIA GB200|NVIDIA GB300", 2500.0),
    # RTX PRO 6000: 188 multiprocessors x 1024 operations x 2.617 and 2.28 GHz. The clock of the
    # Server Edition is not known here.
    (r"NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8),
    (r"NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9),
    # GeForce: white papers, beside multiprocessors x 512 operations x boost clock, which gives
    # 71.2, 80.0, 165.2, 97.5, 209.5 and 112.6.
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
