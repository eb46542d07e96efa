-- quota.lua: keeps the requests and tokens of any minute within the provider's quota. Not a script of its own:
-- lease.lua uses it.
--
-- A process holds a budget: requests that it may start, and tokens that it may reserve. It holds
-- `granted - returned - spent`, three numbers that only grow. A process reports a request as spent when it has sent it,
-- and tokens as spent when their request has ended. Spent amounts count for one window after the report. A grant never
-- makes the sum of all that processes hold and all that counts as spent exceed the quota. A request is held when it is
-- sent, and counts as spent for a window after its process reported it. The requests of any window are therefore within
-- the quota. So are their tokens, whether the provider counts them when a request begins or when it ends.
--
-- When a process's lease ends, all that it holds counts as spent: it may have used it.
--
--   quota  hash  held_requests, held_tokens: of all processes; spent_requests, spent_tokens: within the window;
--                process -> `<epoch> <granted> <returned> <spent> <granted> <returned> <spent>`: requests, then tokens
--   spent  list  `<ms> <requests> <tokens>` by time: spent before then, and counted until a window later

local GRAINS = 60  -- entries of `spent` in a window

local quota = {}
local REQUESTS, TOKENS = 1, 2
local held, spent, added, records, changed = {}, {}, {0, 0}, {}, {}

-- A limit of 0 means no limit. `window` is in ms.
function quota.open(key, list, requests, tokens, window, now)
  quota.key, quota.list, quota.window, quota.now = key, list, window, now
  quota.limits = {requests > 0 and requests or math.huge, tokens > 0 and tokens or math.huge}
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

local function read(name)
  if records[name] == nil then
    local text = redis.call('HGET', quota.key, name)
    local f = {}
    for field in string.gmatch(text or '', '%d+') do f[#f + 1] = tonumber(field) end
    records[name] = text and {epoch = f[1], granted = {f[2], f[5]}, returned = {f[3], f[6]}, spent = {f[4], f[7]}}
  end
  return records[name]
end

local function held_by(p, n) return p.granted[n] - p.returned[n] - p.spent[n] end

-- Counts all that the process held as spent.
function quota.end_lease(name)
  local p = read(name)
  if not p then return end
  for n = REQUESTS, TOKENS do
    held[n], added[n] = held[n] - held_by(p, n), added[n] + held_by(p, n)
  end
  redis.call('HDEL', quota.key, name)
  records[name], changed[name] = false, nil
end

-- Takes in a process's report: for requests and for tokens the amounts granted, returned and spent, as far as it knows.
function quota.report(name, epoch, amounts)
  local p = read(name)
  if p and p.epoch ~= epoch then
    quota.end_lease(name)
    p = nil
  end
  if not p then
    p = {epoch = epoch, granted = {0, 0}, returned = {0, 0}, spent = {0, 0}}
    records[name] = p
  end
  for n = REQUESTS, TOKENS do
    local before, new = held_by(p, n), math.max(0, amounts[n].spent - p.spent[n])
    p.granted[n] = math.max(p.granted[n], amounts[n].granted)
    p.returned[n] = math.max(p.returned[n], amounts[n].returned)
    p.spent[n], added[n] = p.spent[n] + new, added[n] + new
    held[n] = held[n] + held_by(p, n) - before
  end
  changed[name] = true
end

local function free(n) return quota.limits[n] - held[n] - spent[n] - added[n] end

function quota.fits(tokens) return free(REQUESTS) >= 1 and free(TOKENS) >= tokens end

-- Returns how much of what is free one of `count` processes gets as spare, so that the next one still finds some.
function quota.spare_part(n, wanted, count) return math.max(0, math.min(wanted, math.floor(free(n) / (2 * count)))) end

function quota.grant(name, requests, tokens)
  local p = read(name)
  for n, amount in ipairs({requests, tokens}) do
    if quota.limits[n] < math.huge and p then
      p.granted[n], held[n] = p.granted[n] + amount, held[n] + amount
      changed[name] = true
    elseif quota.limits[n] < math.huge then  -- the process does not report a quota
      added[n] = added[n] + amount
    end
  end
end

-- Counts the whole quota as spent, because the last window is unknown.
function quota.assume_spent()
  for n = REQUESTS, TOKENS do
    if quota.limits[n] < math.huge then added[n] = math.max(added[n], quota.limits[n] - held[n] - spent[n]) end
  end
end

-- Writes all changes.
function quota.write()
  if added[REQUESTS] > 0 or added[TOKENS] > 0 then
    local grain = math.ceil(quota.window / GRAINS)
    local before, sums = (math.floor(quota.now / grain) + 1) * grain, {added[REQUESTS], added[TOKENS]}
    local last = redis.call('LINDEX', quota.list, -1)
    local at, requests, tokens = string.match(last or '', '(%d+) (%d+) (%d+)')
    if at and tonumber(at) >= before then
      before, sums = tonumber(at), {sums[REQUESTS] + tonumber(requests), sums[TOKENS] + tonumber(tokens)}
    else
      last = nil
    end
    local entry = string.format('%.0f %.0f %.0f', before, sums[REQUESTS], sums[TOKENS])
    if last then redis.call('LSET', quota.list, -1, entry) else redis.call('RPUSH', quota.list, entry) end
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
  redis.call('HSET', quota.key, unpack(fields))
end

-- Returns the time (ms) at which the oldest spent amount is free again; nil if nothing is spent.
function quota.next_free_at()
  local first = redis.call('LINDEX', quota.list, 0)
  return first and tonumber(string.match(first, '%d+')) + quota.window
end

-- Returns {requests granted to the process, tokens granted to it, requests free, tokens free}; free amounts are of all
-- processes, and -1 without a limit.
function quota.describe(name)
  local p = read(name)
  local function free_or_unlimited(n) return free(n) < math.huge and free(n) or -1 end
  local requests, tokens = free_or_unlimited(REQUESTS), free_or_unlimited(TOKENS)
  return {p and p.granted[REQUESTS] or 0, p and p.granted[TOKENS] or 0, requests, tokens}
end
