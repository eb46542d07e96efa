-- set_entry_idle.lua: sets the idle time of a worker's entries: 0 while it holds them, a large one when it releases them.
--
-- Only entries that are pending for this worker change. A plain XCLAIM would take an entry from the worker that has
-- claimed it in the meantime, and both would process it.
--
-- KEYS[1]  stream
-- ARGV     group, consumer, new idle time (ms), entries…
--
-- Returns  the number of entries that are pending for this worker

local group, consumer, idle = ARGV[1], ARGV[2], ARGV[3]

local count = 0
for n = 4, #ARGV do
  local entry = ARGV[n]
  if #redis.call('XPENDING', KEYS[1], group, entry, entry, 1, consumer) > 0 then
    redis.call('XCLAIM', KEYS[1], group, consumer, 0, entry, 'IDLE', idle, 'JUSTID')
    count = count + 1
  end
end
return count
