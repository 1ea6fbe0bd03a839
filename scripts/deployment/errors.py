"""What goes wrong while stacks are deployed, in words that name the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    EndpointConnectionError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
)

from thunderagent.model.errors import ThunderAgentError

EXPIRED: Final = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired"})
UNKNOWN: Final = frozenset({"InvalidClientTokenId", "SignatureDoesNotMatch", "UnrecognizedClientException"})
DENIED: Final = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403"})


class DeploymentError(ThunderAgentError):
    """A deployment cannot go on."""


class WrongOption(DeploymentError):
    """What the command line says cannot be meant; nothing was done."""


@contextmanager
def told(doing: str) -> Iterator[None]:
    """Tell what AWS refuses in words.

    Args:
        doing: what was being done, such as `reading the stack x`.

    Raises:
        DeploymentError: AWS refused, or could not be reached.
    """
    try:
        yield
    except (NoCredentialsError, PartialCredentialsError, ProfileNotFound) as error:
        raise DeploymentError(
            f"no usable AWS credentials ({error}): set AWS_PROFILE, or run aws sso login, or try it without an "
            "account: scripts/deploy --local"
        ) from error
    except NoRegionError as error:
        raise WrongOption("no AWS region: give --region, for example --region eu-central-1") from error
    except EndpointConnectionError as error:
        raise DeploymentError(f"{doing}: no answer ({error}); is the region right, and the network there?") from error
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code in EXPIRED:
            raise DeploymentError(f"the AWS credentials have expired ({code}): run aws sso login") from error
        if code in UNKNOWN:
            raise DeploymentError(f"AWS does not know these credentials ({code}): look at AWS_PROFILE") from error
        if code in DENIED:
            raise DeploymentError(
                f"{doing}: not allowed. {_message(error)} What a deployment needs is in docs/guides/aws.md"
            ) from error
        raise DeploymentError(f"{doing}: {_message(error)} ({code})") from error
    except BotoCoreError as error:
        raise DeploymentError(f"{doing}: {error}") from error


def _message(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Message") or error)
