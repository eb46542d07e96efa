-- emit.lua: an event happened; it waits to be delivered.
-- uses deliveries
--
-- KEYS[1]  stream  the partition's events
-- KEYS[2]  stream  the account's log
-- KEYS[3]  hash    the partition's outcomes
-- KEYS[4]  string  that this id was emitted; or none. With it, a try whose answer was lost may be repeated
-- ARGV     id, account, app (name, or ''), type, data (JSON)
--
-- Returns  'queued' | 'dropped'

if KEYS[4] and not redis.call('SET', KEYS[4], '1', 'NX', 'EX', 3600) then return 'queued' end
return enqueue(KEYS[1], KEYS[2], KEYS[3], ARGV)
