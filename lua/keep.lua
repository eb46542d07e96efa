-- keep.lua: a worker still has these entries: their idle time starts again. Or it gives them back: they are anybody's.
--
-- Only what is pending for the worker is touched. A plain XCLAIM would take an entry from the worker that claimed it
-- in the meantime, and both would send it.
--
-- KEYS[1]  stream
-- ARGV     group, consumer, idle time from now on (ms), entries…
--
-- Returns  how many were this worker's

local mine = 0
for n = 4, #ARGV do
  if #redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[n], ARGV[n], 1, ARGV[2]) > 0 then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[n], 'IDLE', ARGV[3], 'JUSTID')
    mine = mine + 1
  end
end
return mine
