-- add_trail_entry.lua: adds a change to an account's trail, or counts it with the entry of an equal change.
--
-- Counts and adds in one step: of several equal changes at once, one adds the entry. The oldest entries of an actor
-- leave before that actor has more than its share, so nobody can push out what others did with a flood of changes.
--
-- KEYS[1]  stream  one part of the trail
-- KEYS[2]  hash    entry -> number of equal changes, if there are several
-- KEYS[3]  list    the actor's entries in the stream, oldest first. It may begin with some that the stream has not any
--                  more: only this actor's next change drops them
-- KEYS[4]  string  the entry with which equal changes of this minute are counted. It may have left the stream
-- ARGV     limit of entries, limit of one actor's entries, seconds for which they are kept, seconds for which equal
--          changes are counted, then names and values of the entry
--
-- Returns  the entry

local MAX_REMOVED = 10  -- old entries per call, so that a call after a long pause is no longer than others

local stream, counts, of_actor, last = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local max, share, kept, counted = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])

local function milliseconds(entry)
  return tonumber(string.match(entry, '^%d+'))
end

local function is_before(entry, other)
  local ms, other_ms = milliseconds(entry), milliseconds(other)
  if ms ~= other_ms then return ms < other_ms end
  return tonumber(string.match(entry, '%d+$')) < tonumber(string.match(other, '%d+$'))
end

local function oldest()
  local found = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)
  return found[1] and found[1][1]
end

local function remove(entry)
  redis.call('XDEL', stream, entry)
  redis.call('HDEL', counts, entry)
end

local entry = redis.call('GET', last)
if entry and #redis.call('XRANGE', stream, entry, entry) == 1 then
  redis.call('HSET', counts, entry, tonumber(redis.call('HGET', counts, entry) or 1) + 1)
  redis.call('EXPIRE', counts, kept)
  return entry
end

local ends, first = tonumber(redis.call('TIME')[1]) * 1000 - kept * 1000, oldest()
local own = redis.call('LINDEX', of_actor, 0)
while own and (not first or is_before(own, first)) do
  redis.call('LPOP', of_actor)
  own = redis.call('LINDEX', of_actor, 0)
end
-- The actor's share first: one that has all of it makes room with its own entries alone.
while redis.call('LLEN', of_actor) >= share do remove(redis.call('LPOP', of_actor)) end
for _ = 1, MAX_REMOVED do
  first = oldest()
  if not first or (milliseconds(first) >= ends and redis.call('XLEN', stream) < max) then break end
  remove(first)
end

entry = redis.call('XADD', stream, '*', unpack(ARGV, 5))
redis.call('RPUSH', of_actor, entry)
redis.call('SET', last, entry, 'EX', counted)
for _, key in ipairs({stream, counts, of_actor}) do redis.call('EXPIRE', key, kept) end
return entry
