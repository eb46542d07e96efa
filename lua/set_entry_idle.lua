-- set_entry_idle.lua: sets the idle time of a worker's entries: to 0 while it holds them, to a large one when it gives them back.
--
-- It touches only entries that are pending for the worker. A plain XCLAIM would take an entry from the worker that
-- claimed it in the meantime, and both would send it.
--
-- KEYS[1]  stream
-- ARGV     group, consumer, idle time from now on (ms), entries…
--
-- Returns  the number of entries that were this worker's

local mine = 0
for n = 4, #ARGV do
  if #redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[n], ARGV[n], 1, ARGV[2]) > 0 then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[n], 'IDLE', ARGV[3], 'JUSTID')
    mine = mine + 1
  end
end
return mine
