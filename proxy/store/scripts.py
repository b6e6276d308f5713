"""What servers do in one step of their own, because looking and acting must not come apart."""

from __future__ import annotations

from typing import Final

EXTEND: Final = "return redis.call('get', KEYS[1]) == ARGV[1] and redis.call('pexpire', KEYS[1], ARGV[2]) or 0"
"""Only who took a lease may renew it."""

RELEASE: Final = "return redis.call('get', KEYS[1]) == ARGV[1] and redis.call('unlink', KEYS[1]) or 0"
"""And only who took it may give it back."""

SWAP: Final = """
if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('set', KEYS[1], ARGV[2], 'px', ARGV[3])
return 1
"""
"""The same record under another key: nobody may miss it meanwhile, and what somebody else wrote stays."""

ADD: Final = "redis.call('incrby', KEYS[1], ARGV[1]) return redis.call('pexpire', KEYS[1], ARGV[2])"
"""A count that nobody adds to any more ends."""

NOTE: Final = """
redis.call('hset', KEYS[1], ARGV[1], ARGV[2])
if redis.call('hlen', KEYS[1]) > tonumber(ARGV[3]) then
  local fields = redis.call('hkeys', KEYS[1])
  table.sort(fields)
  redis.call('hdel', KEYS[1], fields[1])
end
if redis.call('pttl', KEYS[1]) < tonumber(ARGV[4]) then redis.call('pexpire', KEYS[1], ARGV[4]) end
return 1
"""
"""A table lives as long as what was meant to live longest in it, and loses the field that sorts first when full."""

RANK: Final = """
redis.call('zadd', KEYS[1], ARGV[2], ARGV[1])
redis.call('zremrangebyrank', KEYS[1], 0, -1 - tonumber(ARGV[3]))
return redis.call('pexpire', KEYS[1], ARGV[4])
"""
"""A list of the newest is never longer than it may be."""
