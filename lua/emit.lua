-- emit.lua: an event happened; it waits to be delivered.
-- uses deliveries
--
-- KEYS[1]  stream  the partition's events
-- KEYS[2]  stream  the account's log
-- KEYS[3]  hash    the partition's outcomes
-- ARGV     id, account, app (name, or ''), type, data (JSON)
--
-- Returns  'queued' | 'dropped'

return enqueue(KEYS[1], KEYS[2], KEYS[3], ARGV)
