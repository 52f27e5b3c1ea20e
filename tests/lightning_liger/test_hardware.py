"""The table of GPUs, and the rate of devices that are not in it."""

import re
from typing import get_args

import pytest
import torch

from lightning_liger.hardware import GPUS, GpuName, _measured, find_gpu, get_gpu, measure_matmul_flops

NAMES = """
NVIDIA H100 80GB HBM3=79.1 h100-80gb|NVIDIA H100 PCIe=79.2 h100-pcie-80gb|NVIDIA H100 NVL=93.1 h100-nvl-94gb
NVIDIA H200=139.8 h200-141gb|NVIDIA H200 NVL=139.8 h200-nvl-141gb|NVIDIA H20=95.1 h20-96gb
NVIDIA GH200 480GB=94.5 gh200-96gb|NVIDIA GH200 144G HBM3e=140.4 gh200-144gb|NVIDIA B200=178.4 b200-180gb
NVIDIA GB200=184.0 gb200-186gb|NVIDIA A100-SXM4-80GB=79.3 a100-80gb|NVIDIA A100-SXM4-40GB=39.4 a100-40gb
NVIDIA A100-PCIE-40GB=39.4 a100-40gb|NVIDIA A100 80GB PCIe=79.2 a100-pcie-80gb|NVIDIA A10G=22.2 a10g-24gb
NVIDIA A10=22.1 a10-24gb|NVIDIA L4=22.2 l4-24gb|NVIDIA L40=44.4 l40-48gb|NVIDIA L40S=44.5 l40s-48gb
Tesla T4=14.6 t4-16gb|Tesla V100-SXM2-16GB=15.8 v100-16gb|Tesla V100-PCIE-32GB=31.7 v100-pcie-32gb
NVIDIA GeForce RTX 4090=23.5 rtx4090-24gb|AMD Instinct MI300X=192.0 mi300x-192gb
NVIDIA H100 80GB HBM3 MIG 1g.10gb=9.8 none|NVIDIA GeForce RTX 4090 Laptop GPU=15.7 none
NVIDIA GeForce RTX 4090 D=23.5 none|Some GPU=80.0 none
"""
"""What torch reports, name and GiB, and the key."""


def test_devices_are_found_by_the_name_and_memory_that_torch_reports():
    for each in NAMES.strip().replace("\n", "|").split("|"):
        name, _, others = each.partition("=")
        memory, key = others.split()
        assert find_gpu(name, int(float(memory) * 2**30)) is GPUS.get(key), name


def test_rates_are_dense_and_in_one_unit():
    for key, gpu in GPUS.items():
        gigabytes = int(re.search(r"(\d+)gb$", key)[1])
        assert 0.85 < gpu.memory_bytes / (gigabytes * 1e9) < 1.08, key
        assert 5e13 < gpu.bfloat16_flops < 3e15, key
        assert gpu.float32_flops < gpu.bfloat16_flops, key
        assert 1e11 < gpu.memory_bandwidth < 1e13, key
        assert gpu.float8_flops in (None, 2 * gpu.bfloat16_flops), key
    h100 = get_gpu("H100-80GB")
    assert h100.peak_flops(torch.float8_e4m3fn) == pytest.approx(1979e12, rel=1e-3)
    a100 = get_gpu("a100-80gb")
    assert (a100.float8_flops, a100.peak_flops(torch.float8_e4m3fn)) == (None, 312e12)
    assert (h100.peak_flops(torch.bfloat16), h100.peak_flops(torch.float32)) == (989.4e12, 494.7e12)


def test_an_unknown_name_is_told_the_five_most_similar_and_where_all_are():
    for name, meant in (("h100-80", "h100-80gb"), ("4090", "rtx4090-24gb"), ("A100", "a100-80gb")):
        with pytest.raises(
            ValueError, match=rf"inspect --help` lists them\), got '{name}' \(did you mean '{meant}'"
        ) as found:
            get_gpu(name)
        assert str(found.value).count("gb'") == 5
    with pytest.raises(ValueError, match="mean 'h100-80gb', 'h100-nvl-94gb', 'h100-pcie-80gb'"):
        get_gpu("h100")
    assert tuple(GPUS) == get_args(GpuName)


def test_rate_of_matrix_products_is_measured_once(monkeypatch):
    monkeypatch.setattr("lightning_liger.hardware._MATMUL_SECONDS", 0.001)
    monkeypatch.setattr("lightning_liger.hardware._MATMUL_SIZE", {"cpu": 64})
    _measured.cache_clear()
    rate = measure_matmul_flops("cpu", torch.float32)
    assert 1e6 < rate < 1e15
    assert measure_matmul_flops(torch.device("cpu"), torch.float32) == rate
    _measured.cache_clear()
