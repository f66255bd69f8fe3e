"""Tests of toolroll.errors: attribution of faults, and messages."""

import pickle

import pytest

from toolroll.errors import ConfigError, Fault, InfraFault, MissingExtra, PolicyFault, ToolContractError, fault_of


@pytest.mark.parametrize(
    "error", [PolicyFault("x"), ValueError("x"), OSError("x"), ZeroDivisionError(), TimeoutError()]
)
def test_other_exceptions_are_policy_faults(error: Exception) -> None:
    assert fault_of(error) is Fault.POLICY


@pytest.mark.parametrize("error", [InfraFault("x"), ToolContractError("x")])
def test_infra_fault_subclasses_are_infra_faults(error: Exception) -> None:
    assert fault_of(error) is Fault.INFRA


def test_missing_extra_names_install_command() -> None:
    error = MissingExtra("ray", "ray")
    assert "pip install 'toolroll[ray]'" in str(error)
    assert isinstance(error, ImportError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert isinstance(error, ConfigError)
