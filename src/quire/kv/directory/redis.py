"""A directory in Redis or Valkey: ordinary commands, and Lua scripts where several must be atomic.

Keys, all of which begin with `PREFIX`: `owner`, the cluster that these nodes belong to; `nodes`, their names; `n:NAME`,
a node's epoch and address, which expires with its lease; `b:HASH`, by node name, the epochs in which nodes published a
block. An entry counts while its epoch is that of its node's lease, so nothing has to be cleaned up after a crash. Only
Redis measures time, so the nodes' clocks are never compared. A script deletes a key of another type, which something
else has made.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from quire.errors import ConfigError
from quire.kv.directory.base import Holders, Node, other_cluster
from quire.kv.directory.redis_link import TIMEOUT_SECONDS, RedisLink

logger = logging.getLogger(__name__)

PREFIX = b"quire:{kv}:"
"""With a hash tag, so that all keys are in one slot of a Redis Cluster."""

ENTRY_SECONDS = 3600
"""An entry that is not published again expires after this."""

MOST_HOLDERS = 8
"""If more nodes than this have published a block, those that have left are removed from its entry."""

_SCRIPT = """
local deleted = 0
local function call(command, key, ...)
  local answer = redis.pcall(command, key, ...)
  if type(answer) ~= 'table' or not answer.err then return answer end
  if string.find(answer.err, 'WRONGTYPE', 1, true) then deleted = deleted + redis.call('DEL', key) end
  return redis.call(command, key, ...)
end
local function run()
%s
end
local answer = run()
return {deleted, answer}
"""
"""What all scripts have in common: before its answer comes the number of keys deleted as they were of another type."""

_JOIN = """
local owner = call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return -1 end
local known = call('GET', KEYS[2]) == ARGV[2]
call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
call('SADD', KEYS[3], ARGV[4])
return known and 1 or 0
"""

_LEAVE = """
if call('GET', KEYS[1]) == ARGV[1] then
  call('DEL', KEYS[1])
  call('SREM', KEYS[2], ARGV[2])
end
"""

_EPOCH = """
local epochs = {}
local function epoch(name, prefix)
  if epochs[name] == nil then
    local record = call('GET', prefix .. name)
    epochs[name] = record and string.match(record, '^[^\\n]*') or false
  end
  return epochs[name]
end
"""

_PUBLISH = (
    _EPOCH
    + """
local name, own, prefix = ARGV[1], ARGV[2], ARGV[3]
if epoch(name, prefix) ~= own then return 0 end
for _, block in ipairs(KEYS) do
  call('HSET', block, name, own)
  call('PEXPIRE', block, ARGV[4])
  if call('HLEN', block) > tonumber(ARGV[5]) then
    local held = call('HGETALL', block)
    for i = 1, #held, 2 do
      if epoch(held[i], prefix) ~= held[i + 1] then call('HDEL', block, held[i]) end
    end
  end
end
return 1
"""
)

_WITHDRAW = """
for _, block in ipairs(KEYS) do
  if call('HGET', block, ARGV[1]) == ARGV[2] then call('HDEL', block, ARGV[1]) end
end
"""

_QUERY = (
    _EPOCH
    + """
local numbers, records, rows = {}, {}, {}
for place, block in ipairs(KEYS) do
  local held, row = call('HGETALL', block), {}
  for i = 1, #held, 2 do
    local name = held[i]
    if epoch(name, ARGV[1]) == held[i + 1] then
      if not numbers[name] then
        table.insert(records, {name, call('GET', ARGV[1] .. name)})
        numbers[name] = #records
      end
      table.insert(row, numbers[name])
    end
  end
  if #row == 0 and string.byte(ARGV[2], place) == 49 then break end
  table.insert(rows, row)
end
return {records, rows}
"""
)

_LIST = """
local found = {}
for _, name in ipairs(call('SMEMBERS', KEYS[1])) do
  local record = call('GET', ARGV[1] .. name)
  if record then table.insert(found, {name, record}) else call('SREM', KEYS[1], name) end
end
return found
"""

_SCRIPTS = _JOIN, _LEAVE, _PUBLISH, _WITHDRAW, _QUERY, _LIST


class RedisDirectory:
    """See `base.Directory`.

    Args:
        url: the server's URL, in redis-py's format.
        cluster: identifies the cluster's key.
        timeout: seconds per command.

    Raises:
        ConfigError: the URL is not valid, or redis-py is not installed.
    """

    def __init__(self, url: str, cluster: str, timeout: float = TIMEOUT_SECONDS) -> None:
        self._link, self._cluster = RedisLink(url, "kv_directory", timeout), cluster
        self._client, self._where, self._call = self._link.client, self._link.where, self._link.call
        scripts = {body: self._client.register_script(_SCRIPT % body) for body in _SCRIPTS}
        self._scripts, self._warned = scripts, False

    def check(self) -> None:
        self._link.check()

    def join(self, node: Node, lease: float) -> bool:
        keys = [PREFIX + b"owner", _node_key(node.name), PREFIX + b"nodes"]
        how = self._run(_JOIN, keys, [self._cluster, _record(node), int(lease * 1000), node.name])
        if how < 0:
            raise ConfigError(other_cluster(self._where))
        return bool(how)

    def leave(self, node: Node) -> None:
        keys = [_node_key(node.name), PREFIX + b"nodes"]
        self._run(_LEAVE, keys, [_record(node), node.name])

    def publish(self, node: Node, blocks: Sequence[bytes]) -> bool:
        more: list[str | bytes | int] = [node.name, node.epoch, _node_key(""), ENTRY_SECONDS * 1000, MOST_HOLDERS]
        return bool(self._run(_PUBLISH, _block_keys(blocks), more))

    def withdraw(self, node: Node, blocks: Sequence[bytes]) -> None:
        self._run(_WITHDRAW, _block_keys(blocks), [node.name, node.epoch])

    def query(self, blocks: Sequence[bytes], needed: Sequence[bool] | None = None) -> Holders:
        ends = "".join("01"[each] for each in needed or [True] * len(blocks))
        records, rows = self._run(_QUERY, _block_keys(blocks), [_node_key(""), ends])
        nodes = [_node(*each) for each in records]
        return [[nodes[number - 1] for number in row] for row in rows]

    def nodes(self) -> list[Node]:
        return [_node(*each) for each in self._run(_LIST, [PREFIX + b"nodes"], [_node_key("")])]

    def close(self) -> None:
        self._client.close()

    def _run(self, body: str, keys: Sequence[bytes], more: Sequence[str | bytes | int]) -> Any:
        """A script's answer; None if it has none."""
        deleted, *answer = self._call(lambda: self._scripts[body](keys, more))
        if deleted and not self._warned:
            self._warned = True
            logger.warning(
                "%s: keys of a type that no engine makes are deleted there (%d now, and later ones without a word); "
                "give the engines a database that nothing else writes to",
                self._where,
                deleted,
            )
        return answer[0] if answer else None


def _node_key(name: str) -> bytes:
    return PREFIX + b"n:" + name.encode()


def _block_keys(blocks: Sequence[bytes]) -> list[bytes]:
    return [PREFIX + b"b:" + block for block in blocks]


def _record(node: Node) -> str:
    return f"{node.epoch}\n{node.address}"


def _node(name: bytes, record: bytes) -> Node:
    epoch, _, address = record.decode(errors="replace").partition("\n")
    return Node(name.decode(errors="replace"), epoch, address)
