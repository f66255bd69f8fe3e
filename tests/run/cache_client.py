"""Call the tool of upstream.py with a cache in a file: `python cache_client.py FILE WORD`. Prints whether it hit."""

import asyncio
import sys

from run.upstream import look_up
from toolroll import ToolInstance
from toolroll.tools.cache_settings import CacheSettings


async def ask(word: str) -> str:
    """Call the tool, and return its answer and whether it was cached."""
    async with ToolInstance(look_up) as instance:
        result = await instance.execute({"word": word})
    return f"{result.response.text} {'cached' if 'cache' in result.metrics else 'called'}"


if __name__ == "__main__":
    look_up.cache = CacheSettings(path=sys.argv[1])
    print(asyncio.run(ask(sys.argv[2])), flush=True)
