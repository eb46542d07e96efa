-- take_back_trail_entry.lua: takes back a change that was refused: its entry in an account's trail, or one of the equal
-- changes that are counted with it.
--
-- Counts and removes in one step: of two equal changes that are refused at once, one must not remove the entry of a
-- third, which was made.
--
-- KEYS[1]  stream  one part of the trail
-- KEYS[2]  hash    entry -> number of equal changes, if there are several
-- KEYS[3]  list    the actor's entries in the stream
-- ARGV     entry
--
-- Returns  the number of changes that are left with this entry

local stream, counts, of_actor = KEYS[1], KEYS[2], KEYS[3]
local entry = ARGV[1]

local count = tonumber(redis.call('HGET', counts, entry) or 1) - 1
if count > 1 then
  redis.call('HSET', counts, entry, count)
elseif count == 1 then
  redis.call('HDEL', counts, entry)
else
  redis.call('XDEL', stream, entry)
  redis.call('LREM', of_actor, -1, entry)
end
return count
