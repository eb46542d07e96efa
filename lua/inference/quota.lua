-- quota.lua: the provider's quota of any minute, of requests and of tokens. Shared: events/deliveries.lua says how.
--
-- A process holds a budget: requests that it may start, and tokens that it may reserve. What it holds is
-- `granted - returned - spent`, three numbers that only grow. A request is spent when its process says that it was sent,
-- tokens when it says that the request has ended with so many. What is spent counts for one window from then on. What
-- all processes hold and what counts as spent never passes the quota by a grant. Since each request was held when it was
-- sent and counts as spent for a window after its process said so, the requests of any window are within the quota, and
-- so are their tokens, whether the provider counts them when a request begins or when it ends.
--
-- What a process holds when its lease ends is spent: it may have used all of it.
--
--   rate   hash  held_requests, held_tokens: of all processes; spent_requests, spent_tokens: within the window;
--                process -> `<epoch> <granted> <returned> <spent> <granted> <returned> <spent>`: requests, then tokens
--   spent  list  `<ms> <requests> <tokens>` by time: spent before then, and counted until a window later

local GRAINS = 60  -- entries of `spent` in a window

local rate = {}
local REQUESTS, TOKENS = 1, 2
local held, spent, added, records, changed = {}, {}, {0, 0}, {}, {}

-- A quota of 0 is none. `window` is in ms.
function rate.open(key, list, requests, tokens, window, now)
  rate.key, rate.list, rate.window, rate.now = key, list, window, now
  rate.quota = {requests > 0 and requests or math.huge, tokens > 0 and tokens or math.huge}
  local sums = redis.call('HMGET', key, 'held_requests', 'held_tokens', 'spent_requests', 'spent_tokens')
  held = {tonumber(sums[1] or 0), tonumber(sums[2] or 0)}
  spent = {tonumber(sums[3] or 0), tonumber(sums[4] or 0)}
  local first = redis.call('LINDEX', list, 0)
  while first do
    local before, requests, tokens = string.match(first, '(%d+) (%d+) (%d+)')
    if tonumber(before) + window > now then break end
    spent = {spent[REQUESTS] - tonumber(requests), spent[TOKENS] - tonumber(tokens)}
    redis.call('LPOP', list)
    first = redis.call('LINDEX', list, 0)
  end
end

local function record(name)
  if records[name] == nil then
    local text = redis.call('HGET', rate.key, name)
    local f = {}
    for field in string.gmatch(text or '', '%d+') do f[#f + 1] = tonumber(field) end
    records[name] = text and {epoch = f[1], granted = {f[2], f[5]}, returned = {f[3], f[6]}, spent = {f[4], f[7]}}
  end
  return records[name]
end

local function held_by(p, n) return p.granted[n] - p.returned[n] - p.spent[n] end

-- All that the process held is spent.
function rate.end_lease(name)
  local p = record(name)
  if not p then return end
  for n = REQUESTS, TOKENS do
    held[n], added[n] = held[n] - held_by(p, n), added[n] + held_by(p, n)
  end
  redis.call('HDEL', rate.key, name)
  records[name], changed[name] = false, nil
end

-- What the process says of its budget: for requests and for tokens what it knows was granted, returned and spent.
function rate.report(name, epoch, says)
  local p = record(name)
  if p and p.epoch ~= epoch then
    rate.end_lease(name)
    p = nil
  end
  if not p then
    p = {epoch = epoch, granted = {0, 0}, returned = {0, 0}, spent = {0, 0}}
    records[name] = p
  end
  for n = REQUESTS, TOKENS do
    local before, new = held_by(p, n), math.max(0, says[n].spent - p.spent[n])
    p.granted[n], p.returned[n] = math.max(p.granted[n], says[n].granted), math.max(p.returned[n], says[n].returned)
    p.spent[n], added[n] = p.spent[n] + new, added[n] + new
    held[n] = held[n] + held_by(p, n) - before
  end
  changed[name] = true
end

local function free(n) return rate.quota[n] - held[n] - spent[n] - added[n] end

function rate.fits(tokens) return free(REQUESTS) >= 1 and free(TOKENS) >= tokens end

-- A part of what is free for one of so many processes, such that the next to ask finds some.
function rate.part(n, wanted, count) return math.max(0, math.min(wanted, math.floor(free(n) / (2 * count)))) end

function rate.grant(name, requests, tokens)
  local p = record(name)
  for n, amount in ipairs({requests, tokens}) do
    if rate.quota[n] < math.huge and p then
      p.granted[n], held[n] = p.granted[n] + amount, held[n] + amount
      changed[name] = true
    elseif rate.quota[n] < math.huge then  -- a process that knows of no quota
      added[n] = added[n] + amount
    end
  end
end

-- Nothing is known of the last window: it may have used up the quota.
function rate.fill()
  for n = REQUESTS, TOKENS do
    if rate.quota[n] < math.huge then added[n] = math.max(added[n], rate.quota[n] - held[n] - spent[n]) end
  end
end

-- Writes what has changed.
function rate.close()
  if added[REQUESTS] > 0 or added[TOKENS] > 0 then
    local grain = math.ceil(rate.window / GRAINS)
    local before, sums = (math.floor(rate.now / grain) + 1) * grain, {added[REQUESTS], added[TOKENS]}
    local last = redis.call('LINDEX', rate.list, -1)
    local at, requests, tokens = string.match(last or '', '(%d+) (%d+) (%d+)')
    if at and tonumber(at) >= before then
      before, sums = tonumber(at), {sums[REQUESTS] + tonumber(requests), sums[TOKENS] + tonumber(tokens)}
    else
      last = nil
    end
    local entry = string.format('%.0f %.0f %.0f', before, sums[REQUESTS], sums[TOKENS])
    if last then redis.call('LSET', rate.list, -1, entry) else redis.call('RPUSH', rate.list, entry) end
    spent = {spent[REQUESTS] + added[REQUESTS], spent[TOKENS] + added[TOKENS]}
    added = {0, 0}
  end
  local fields = {}
  for name in pairs(changed) do
    local p = records[name]
    fields[#fields + 1] = name
    fields[#fields + 1] = string.format('%.0f %.0f %.0f %.0f %.0f %.0f %.0f', p.epoch,
      p.granted[REQUESTS], p.returned[REQUESTS], p.spent[REQUESTS],
      p.granted[TOKENS], p.returned[TOKENS], p.spent[TOKENS])
  end
  local names = {'held_requests', 'held_tokens', 'spent_requests', 'spent_tokens'}
  for n, sum in ipairs({held[REQUESTS], held[TOKENS], spent[REQUESTS], spent[TOKENS]}) do
    fields[#fields + 1] = names[n]
    fields[#fields + 1] = string.format('%.0f', sum)
  end
  redis.call('HSET', rate.key, unpack(fields))
end

-- When something of what is spent is free again, in ms; nil if nothing is.
function rate.next_free()
  local first = redis.call('LINDEX', rate.list, 0)
  return first and tonumber(string.match(first, '%d+')) + rate.window
end

-- {requests granted, tokens granted, requests free, tokens free}: of the process, and of all; -1 where no quota is.
function rate.answer(name)
  local p = record(name)
  local function known(n) return free(n) < math.huge and free(n) or -1 end
  return {p and p.granted[REQUESTS] or 0, p and p.granted[TOKENS] or 0, known(REQUESTS), known(TOKENS)}
end

