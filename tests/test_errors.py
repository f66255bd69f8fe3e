"""Whose fault a failure is."""

import pickle

import pytest

from toolroll.errors import ConfigError, Fault, InfraFault, MissingExtra, PolicyFault, ToolContractError, fault_of


@pytest.mark.parametrize(
    "error", [PolicyFault("x"), ValueError("x"), OSError("x"), ZeroDivisionError(), TimeoutError()]
)
def test_what_the_policy_can_bring_about_is_its_own_fault(error: Exception) -> None:
    assert fault_of(error) is Fault.POLICY


@pytest.mark.parametrize("error", [InfraFault("x"), ToolContractError("x")])
def test_infrastructure_says_so_itself(error: Exception) -> None:
    assert fault_of(error) is Fault.INFRA


def test_what_is_missing_is_said_with_the_extra_that_brings_it() -> None:
    error = MissingExtra("ray", "ray")
    assert "pip install 'toolroll[ray]'" in str(error)
    assert isinstance(error, ImportError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert isinstance(error, ConfigError)
