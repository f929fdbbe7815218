-- Every change to a job record, each one atomic: a Redis function, since a script would define all of this again for each
-- call, which takes longer than most of them. Its first argument names the operation, the second is the key prefix, the
-- rest are the operation's. Times are the server's own, so that workers' clocks do not matter. Loaded by functions.py.
--
-- A stage of a job is "queued" (work is owed, a message should be in its queue), "running" (claimed: an attempt number,
-- which is the fencing token, and a lease) or "done" (its reference is recorded and never changes again).

-- Of the call in progress, and Redis makes one at a time: the key prefix, the time in seconds, and as it is written.
local P, now, NOW

local TERMINAL = {succeeded = true, failed = true, cancelled = true, expired = true}
-- Reply lists and control lists of processes that are gone vanish by themselves. Those that live read them all the time,
-- and look at the records besides.
local LIST_TTL_S = 5
-- Text that is being written goes this long after its last piece; the whole of it is in the record's result.
local SAID_TTL_S = 60
-- A claim that came with its message has this for a name.
local TAKEN = 'taken'
-- What a message of a stage has in it, as Celery makes it: no other task, and none to be run later or not after a time.
local OURS = {'"task": "omniqueue.run_stage"', '"eta": null', '"expires": null'}
-- A reader that falls further behind takes the rest from the result.
local MOST_SAID = 2000
-- Upper bounds of the buckets that waits and runs are counted in, in seconds; what is longer goes into "inf".
local BOUNDS = {0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 1 / 0}

local function stamp(value) return string.format('%.6f', value) end

local function job_key(id) return P .. ':job:' .. id end
local function get(id, field) return redis.call('HGET', job_key(id), field) end
-- Several fields in the time of one: a call from here costs more than what it finds.
local function fields(id, ...) return redis.call('HMGET', job_key(id), ...) end
local function num(text) return tonumber(text or 0) or 0 end
local function member(id, stage) return id .. ':' .. stage end
local function leases(pipeline) return P .. ':leases:' .. pipeline end

local function queue_of(queues, stage) return cjson.decode(queues)[stage + 1] end

-- Who waits in a queue: since when, and in the order in which the broker gives them out (most urgent first, then oldest).
local function wait_in(queue, id, priority)
  redis.call('ZADD', P .. ':wait:' .. queue, now, id)
  redis.call('ZADD', P .. ':order:' .. queue, num(priority) * 1e11 + now, id)
end

local function wait_no_more(queue, id)
  redis.call('ZREM', P .. ':wait:' .. queue, id)
  redis.call('ZREM', P .. ':order:' .. queue, id)
end

-- The message of this stage is (again) on its way.
local function mark_queued(id, stage)
  local pipeline, queues, priority = unpack(fields(id, 'pipeline', 'queues', 'priority'))
  redis.call('HSET', job_key(id), stage .. ':state', 'queued', stage .. ':queued', NOW, stage .. ':published', NOW,
    'stage', stage)
  wait_in(queue_of(queues, stage), id, priority)
  redis.call('ZREM', leases(pipeline), member(id, stage))
end

local function count(pipeline, what) redis.call('HINCRBY', P .. ':count:' .. pipeline, what, 1) end

-- Add to counters: one read and one write, however many. names and amounts alternate, each name once.
local function add(key, pairs_)
  local names = {}
  for i = 1, #pairs_, 2 do names[#names + 1] = pairs_[i] end
  local old = redis.call('HMGET', key, unpack(names))
  local new = {}
  for i, name in ipairs(names) do
    new[#new + 1] = name
    new[#new + 1] = string.format('%.15g', num(old[i]) + tonumber(pairs_[2 * i]))
  end
  redis.call('HSET', key, unpack(new))
end

local function bucket(seconds)
  for _, bound in ipairs(BOUNDS) do if seconds <= bound then return tostring(bound) end end
end

-- An attempt has ended: how, how long it had waited and, if it is done, how long it ran and what it used. Once for each
-- attempt, whoever ends it.
local function measured(pipeline, stage, queued, started, outcome, ...)
  local key = stage .. ':'
  local wait = math.max(0, num(started) - num(queued))
  local told = {key .. 'end:' .. outcome, 1, key .. 'wait:' .. bucket(wait), 1, key .. 'wait:sum', wait}
  if outcome == 'done' then
    local run = math.max(0, now - num(started))
    local more = {key .. 'run:' .. bucket(run), 1, key .. 'run:sum', run}
    local used = {...}
    for i = 1, #used, 2 do more[#more + 1] = key .. 'use:' .. used[i]; more[#more + 1] = used[i + 1] end
    for _, value in ipairs(more) do told[#told + 1] = value end
  end
  add(P .. ':meter:' .. pipeline, told)
end

local function measure(id, stage, outcome)
  local pipeline, queued, started = unpack(fields(id, 'pipeline', stage .. ':queued', stage .. ':started'))
  measured(pipeline, stage, queued, started, outcome)
end

-- Tell the router that waits for the job to look at it.
local function wake(id, reply)
  if reply and reply ~= '' then
    redis.call('RPUSH', P .. ':reply:' .. reply, id)
    redis.call('EXPIRE', P .. ':reply:' .. reply, LIST_TTL_S)
  end
end

-- The one way into a terminal state.
local function finalize(id, state, error, result)
  local key = job_key(id)
  local pipeline, stage, stages, ttl, reply, queues = unpack(fields(id, 'pipeline', 'stage', 'stages', 'ttl', 'reply',
    'queues'))
  stage, ttl = num(stage), num(ttl)
  local told = {'state', state, 'finished', NOW}
  local function tell(field, value) told[#told + 1] = field; told[#told + 1] = value end
  if get(id, stage .. ':state') ~= 'done' then tell(stage .. ':state', state); tell(stage .. ':ended', NOW) end
  if error then tell('error', error) end
  if result then tell('result', result) end
  redis.call('HSET', key, unpack(told))
  local names, carried = {}, {}
  for k = 0, num(stages) - 1 do names[#names + 1] = k .. ':ref' end
  for k, ref in ipairs(fields(id, unpack(names))) do  -- payloads go with the end of their job, those in the record as well
    if ref and string.find(ref, '"store":"record"', 1, true) then carried[#carried + 1] = names[k] end
  end
  if #carried > 0 then redis.call('HDEL', key, unpack(carried)) end
  redis.call('ZREM', P .. ':live:' .. pipeline, id)
  wait_no_more(queue_of(queues, stage), id)
  redis.call('ZREM', leases(pipeline), member(id, stage))
  redis.call('ZADD', P .. ':ended', now + ttl, id)
  redis.call('EXPIRE', key, math.ceil(ttl) + 86400)  -- a backstop, should no reaper ever run again
  count(pipeline, state)
  wake(id, reply)
  return state
end

local function failure(id, stage, kind, reason, param)
  return cjson.encode({stage = stage, name = cjson.decode(get(id, 'names'))[stage + 1], code = kind, message = reason,
    attempts = num(get(id, stage .. ':attempt')), param = param ~= '' and param or nil})
end

-- An attempt ended without a result. Returns 'queued' when the stage is owed again, else the terminal state.
local function attempt_failed(id, stage, error, retry, counted)
  local key = job_key(id)
  if get(id, 'state') == 'cancelling' then measure(id, stage, 'cancelled'); return finalize(id, 'cancelled') end
  if now > num(get(id, 'deadline')) then
    measure(id, stage, 'expired')
    local late = cjson.decode(error)
    late.code = 'deadline_exceeded'
    return finalize(id, 'expired', cjson.encode(late))
  end
  measure(id, stage, counted and cjson.decode(error).code or 'handed_back')
  if counted then
    local failures = redis.call('HINCRBY', key, stage .. ':failures', 1)
    count(get(id, 'pipeline'), 'attempt_failures')
    if not retry or failures >= num(get(id, 'max_attempts')) then return finalize(id, 'failed', error) end
    redis.call('HSET', key, stage .. ':last_error', error)
  end
  mark_queued(id, stage)
  return 'queued'
end

local function is_current(id, stage, attempt)
  return get(id, stage .. ':state') == 'running' and num(get(id, stage .. ':attempt')) == num(attempt)
    and not TERMINAL[get(id, 'state')]
end

local ops = {}

-- The message of the stage that waits now, where the queues are in this Redis; Celery itself enqueues it elsewhere.
local function enqueue(list, message)
  if list and list ~= '' then redis.call('LPUSH', list, message) end
end

-- id, record (JSON object of strings), max_queue, idempotency key or '', its time to live; then a list and a message
function ops.submit(id, record, max_queue, idem, idem_ttl, list, message)
  -- The client repeats a call whose answer was lost with the connection: it must not start a job's life again.
  if get(id, 'state') then return {'ok', id} end
  local fields = cjson.decode(record)
  if idem ~= '' then
    local known = redis.call('GET', P .. ':idem:' .. idem)
    if known then
      local old = redis.call('HGET', job_key(known), 'digest')
      if old then return {old == fields.digest and 'existing' or 'differs', known} end
    end
  end
  if redis.call('ZCARD', P .. ':live:' .. fields.pipeline) >= tonumber(max_queue) then return {'full'} end
  local flat = {}
  for name, value in pairs(fields) do flat[#flat + 1] = name; flat[#flat + 1] = value end
  redis.call('HSET', job_key(id), unpack(flat))
  redis.call('HSET', job_key(id), 'state', 'queued', 'created', NOW,
    'deadline', stamp(now + tonumber(fields.timeout)))
  redis.call('ZADD', P .. ':live:' .. fields.pipeline, now + tonumber(fields.timeout), id)
  redis.call('ZADD', P .. ':jobs:' .. fields.pipeline, now, id)
  if idem ~= '' then
    redis.call('SET', P .. ':idem:' .. idem, id, 'EX', idem_ttl)
    redis.call('HSET', job_key(id), 'idem', idem)
  end
  count(fields.pipeline, 'accepted')
  mark_queued(id, 0)
  enqueue(list, message)
  return {'ok', id}
end

-- id, stage, worker, lease seconds, fingerprint of the pipeline that the worker knows, '1' when nothing else runs there,
-- a name for this call. Returns why it cannot be claimed, or 'run' and what a worker needs to run it.
function ops.claim(id, stage, worker, lease_s, fingerprint, alone, call)
  local at = stage .. ':'
  stage = num(stage)
  local refs = {}
  for k = 0, stage - 1 do refs[k + 1] = k .. ':ref' end
  local found = fields(id, 'state', 'fingerprint', at .. 'state', at .. 'lease', at .. 'claim', at .. 'failures',
    'max_attempts', 'deadline', at .. 'attempt', 'pipeline', 'queues', 'request', 'priority', 'input', unpack(refs))
  local state, known, stage_state, lease, claim, failures, most, deadline, attempt, pipeline, queues = unpack(found, 1, 11)
  local function granted(number)
    for k = 1, stage do refs[k] = found[14 + k] or '' end
    return {'run', number, found[12], stamp(num(deadline) - now), found[13], found[14] or '', unpack(refs)}
  end
  if not state then return {'gone'} end
  if TERMINAL[state] then return {'over'} end
  if known ~= fingerprint then return {'mismatch'} end
  if stage_state == 'done' then return {'done'} end
  if stage_state == 'running' and num(lease) > now then
    -- Said again, since the first answer was lost with the connection: 'busy' would cost the job a lease.
    return claim == call and call ~= TAKEN and granted(num(attempt)) or {'busy'}
  end
  if stage_state ~= 'queued' and stage_state ~= 'running' then return {'early'} end
  if stage_state == 'running' then  -- its lease has lapsed and the reaper has not been by yet
    local outcome = attempt_failed(id, stage, failure(id, stage, 'worker_lost',
      'The worker ' .. (get(id, at .. 'worker') or '?') .. ' stopped answering.'), true, true)
    if outcome ~= 'queued' then return {'over'} end
    failures = get(id, at .. 'failures')
  end
  if state == 'cancelling' then finalize(id, 'cancelled'); return {'over'} end
  if now > num(deadline) then
    finalize(id, 'expired', failure(id, stage, 'deadline_exceeded', 'The deadline passed while the job waited.'))
    return {'over'}
  end
  -- A worker's death counts against all that ran in it. So the last attempt is made alone: then it is known whose fault
  -- it is, and the neighbours of a request that kills its worker do not fail with it.
  failures = num(failures)
  if alone ~= '1' and failures > 0 and failures + 1 >= num(most) then
    redis.call('HSET', job_key(id), at .. 'published', NOW)  -- its message is in good hands
    return {'alone'}
  end
  local number, ends = num(attempt) + 1, now + tonumber(lease_s)
  redis.call('HSET', job_key(id), 'state', 'running', 'stage', stage, at .. 'state', 'running', at .. 'attempt', number,
    at .. 'worker', worker, at .. 'lease', stamp(ends), at .. 'started', NOW, at .. 'progress', '0/0', at .. 'claim', call)
  redis.call('ZADD', leases(pipeline), ends, member(id, stage))
  wait_no_more(queue_of(queues, stage), id)
  return granted(number)
end

-- The job of a message, if it is one of this stage's as Celery makes it (messages.py), to be run at once.
local function job_of(text, stage)
  for _, part in ipairs(OURS) do if not string.find(text, part, 1, true) then return end end
  return string.match(text, '"id": "(%x+)%-' .. stage .. '"')
end

-- Messages, and claims on their stages: in one step, since every answer that a worker waits for costs it a wake-up.
-- worker, stage, lease seconds, fingerprint, how many messages, then the lists that hold them, most urgent first; before
-- those come messages that were moved into the worker's hand. Returns in threes: message, job and the claim's answer;
-- a message that is not the stage's has no job.
function ops.take(worker, stage, lease_s, fingerprint, most, ...)
  local got, left = {}, tonumber(most)
  for _, list in ipairs({P .. ':hand:' .. worker, ...}) do
    for _, text in ipairs(left > 0 and redis.call('RPOP', list, left) or {}) do
      local id = job_of(text, stage)
      local answer = id and ops.claim(id, stage, worker, lease_s, fingerprint, '0', TAKEN)
      left = left - 1
      got[#got + 1], got[#got + 2], got[#got + 3] = text, id or '', answer or {}
    end
  end
  return got
end

-- id, stage, attempt, reference JSON or '', resolved parameters JSON or '', result JSON or '' (ends the job); then a list
-- and the next stage's message; then what the attempt used: names and amounts
function ops.finish(id, stage, attempt, ref, params, result, list, message, ...)
  local at = stage .. ':'
  stage = num(stage)
  local stage_state, number, state, deadline, queued, started, pipeline, queues, priority = unpack(fields(id, at .. 'state',
    at .. 'attempt', 'state', 'deadline', at .. 'queued', at .. 'started', 'pipeline', 'queues', 'priority'))
  local same = num(number) == num(attempt)
  -- Said again, since the first answer was lost with the connection: 'stale' would make the worker drop its output.
  if stage_state == 'done' and same then return {result ~= '' and state or 'next'} end
  if stage_state ~= 'running' or not same or TERMINAL[state] then return {'stale'} end
  local ends = state == 'cancelling' and 'cancelled' or now > num(deadline) and 'expired' or 'done'
  measured(pipeline, stage, queued, started, ends, ...)
  if ends == 'cancelled' then return {finalize(id, 'cancelled')} end
  if ends == 'expired' then
    return {finalize(id, 'expired', failure(id, stage, 'deadline_exceeded', 'The deadline passed while the stage ran.'))}
  end
  local told = {at .. 'state', 'done', at .. 'ended', NOW, at .. 'ref', ref, at .. 'params', params}
  if result ~= '' then
    redis.call('HSET', job_key(id), unpack(told))
    return {finalize(id, 'succeeded', nil, result)}
  end
  local following = (stage + 1) .. ':'
  redis.call('HSET', job_key(id), following .. 'state', 'queued', following .. 'queued', NOW, following .. 'published', NOW,
    'stage', stage + 1, unpack(told))
  redis.call('ZREM', leases(pipeline), member(id, stage))
  wait_in(queue_of(queues, stage + 1), id, priority)
  enqueue(list, message)
  return {'next'}
end

local function control(id, stage, what)
  local worker = get(id, stage .. ':worker')
  if worker then
    local key = P .. ':control:' .. worker
    redis.call('RPUSH', key, what .. ':' .. id .. ':' .. stage .. ':' .. num(get(id, stage .. ':attempt')))
    redis.call('EXPIRE', key, LIST_TTL_S)
  end
end

-- lease seconds, then id, stage, attempt, progress in fours. Returns those that must stop.
function ops.renew(lease_s, ...)
  local held = {...}
  local stop = {}
  local lease = now + tonumber(lease_s)
  for i = 1, #held, 4 do
    local id, stage, attempt, progress = held[i], num(held[i + 1]), held[i + 2], held[i + 3]
    if is_current(id, stage, attempt) and get(id, 'state') == 'running' then
      redis.call('HSET', job_key(id), stage .. ':lease', stamp(lease), stage .. ':progress', progress)
      redis.call('ZADD', leases(get(id, 'pipeline')), lease, member(id, stage))
    else
      stop[#stop + 1] = id .. ':' .. stage .. ':' .. attempt
      -- A worker that is told to stop must still confirm a cancel, so its lease is kept until then.
      if is_current(id, stage, attempt) then
        redis.call('HSET', job_key(id), stage .. ':lease', stamp(lease))
        redis.call('ZADD', leases(get(id, 'pipeline')), lease, member(id, stage))
      end
    end
  end
  return stop
end

-- Pieces of text that a stage is writing, for whoever reads it meanwhile: a hint, as replies are.
-- id, stage, attempt, then the pieces
function ops.say(id, stage, attempt, ...)
  if not is_current(id, num(stage), attempt) then return {'stale'} end
  local key = P .. ':said:' .. id
  for _, piece in ipairs({...}) do redis.call('XADD', key, 'MAXLEN', '~', MOST_SAID, '*', 'piece', piece) end
  redis.call('EXPIRE', key, SAID_TTL_S)
  wake(id, get(id, 'reply'))
  return {'ok'}
end

-- id, stage, attempt, code, reason, '1' to try again, '1' to count it as a failure, the request's field at fault or ''
function ops.fail(id, stage, attempt, code, reason, retry, counted, param)
  stage = num(stage)
  if not is_current(id, stage, attempt) then return {'stale'} end
  return {attempt_failed(id, stage, failure(id, stage, code, reason, param), retry == '1', counted == '1')}
end

-- Claims that came with their messages and that the worker never heard of, since the connection was lost with the answer:
-- they are owed again. worker, pipeline, then id:stage of what it holds. Returns id:stage of every stage that is owed again.
function ops.unheard(worker, pipeline, ...)
  local held, owed = {}, {}
  for _, entry in ipairs({...}) do held[entry] = true end
  for _, entry in ipairs(redis.call('ZRANGE', leases(pipeline), 0, -1)) do
    local id, stage = entry:match('^(.*):(%d+)$')
    local at = stage .. ':'
    local stage_state, whose, claim = unpack(fields(id, at .. 'state', at .. 'worker', at .. 'claim'))
    if not held[entry] and stage_state == 'running' and whose == worker and claim == TAKEN then
      local reason = 'The connection was lost with the claim.'
      if attempt_failed(id, num(stage), failure(id, num(stage), 'handed_back', reason), true, false) == 'queued' then
        owed[#owed + 1] = entry
      end
    end
  end
  return owed
end

function ops.cancel(id)
  local state = get(id, 'state')
  if not state then return {'gone'} end
  if TERMINAL[state] or state == 'cancelling' then return {state} end
  local stage = num(get(id, 'stage'))
  if get(id, stage .. ':state') == 'running' then
    redis.call('HSET', job_key(id), 'state', 'cancelling')
    control(id, stage, 'stop')
    return {'cancelling'}
  end
  return {finalize(id, 'cancelled')}
end

-- Forget a finished job. Returns its result, so that the caller can remove the files.
function ops.delete(id)
  local state = get(id, 'state')
  if not state then
    redis.call('ZREM', P .. ':ended', id)  -- its backstop came first
    return {'gone'}
  end
  if not TERMINAL[state] then return {'live'} end
  local result = get(id, 'result') or ''
  local idem = get(id, 'idem')
  if idem and redis.call('GET', P .. ':idem:' .. idem) == id then redis.call('DEL', P .. ':idem:' .. idem) end
  redis.call('ZREM', P .. ':jobs:' .. get(id, 'pipeline'), id)
  redis.call('ZREM', P .. ':ended', id)
  redis.call('DEL', job_key(id), P .. ':said:' .. id)
  return {'deleted', result}
end

-- Lapsed leases and passed deadlines. pipeline, limit of each, seconds that a lease may be overdue. Returns how many
-- deadlines had passed, then id:stage of every stage that is owed again.
function ops.reap(pipeline, limit, grace_s)
  local owed = {}
  local lapsed = stamp(now - tonumber(grace_s))
  for _, entry in ipairs(redis.call('ZRANGEBYSCORE', P .. ':leases:' .. pipeline, '-inf', lapsed, 'LIMIT', 0, limit)) do
    local id, stage = entry:match('^(.*):(%d+)$')
    stage = num(stage)
    local state = get(id, 'state')
    if not state or TERMINAL[state] or get(id, stage .. ':state') ~= 'running' then
      redis.call('ZREM', P .. ':leases:' .. pipeline, entry)
    else
      local outcome = attempt_failed(id, stage, failure(id, stage, 'worker_lost',
        'The worker ' .. (get(id, stage .. ':worker') or '?') .. ' stopped answering.'), true, true)
      if outcome == 'queued' then owed[#owed + 1] = member(id, stage) end
    end
  end
  local late = redis.call('ZRANGEBYSCORE', P .. ':live:' .. pipeline, '-inf', now, 'LIMIT', 0, limit)
  for _, id in ipairs(late) do
    local state = get(id, 'state')
    if not state then
      redis.call('ZREM', P .. ':live:' .. pipeline, id)
    else
      local stage = num(get(id, 'stage'))
      local running = get(id, stage .. ':state') == 'running'
      if running then control(id, stage, 'stop'); measure(id, stage, 'expired') end
      finalize(id, 'expired', failure(id, stage, 'deadline_exceeded', running and 'The deadline passed while the stage ran.'
        or 'The deadline passed while the job waited.'))
    end
  end
  table.insert(owed, 1, #late)
  return owed
end

-- Stages that wait although their message is not in the queue. queue, seconds a message may be on its way, limit, then
-- the job of the oldest message of each of the queue's lists. Marks them as published again and returns them.
function ops.lost(queue, grace_s, limit, ...)
  local lost = {}
  local before = now - tonumber(grace_s)
  for _, oldest in ipairs({...}) do
    -- What was published clearly before the oldest message that is still there should be there too.
    local stage = get(oldest, 'stage')
    local published = stage and get(oldest, stage .. ':published')
    before = math.min(before, (published and num(published) or now - 9 * tonumber(grace_s)) - tonumber(grace_s))
  end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. ':wait:' .. queue, '-inf', before, 'LIMIT', 0, limit)) do
    local state = get(id, 'state')
    local stage = get(id, 'stage')
    if not state or TERMINAL[state] or get(id, stage .. ':state') ~= 'queued' then
      wait_no_more(queue, id)
    elseif num(get(id, stage .. ':published')) < before then
      redis.call('HSET', job_key(id), stage .. ':published', NOW)
      lost[#lost + 1] = member(id, stage)
    end
  end
  return lost
end

-- Ids of finished jobs whose time to live has passed, at most limit of them.
function ops.outdated(limit) return redis.call('ZRANGEBYSCORE', P .. ':ended', '-inf', now, 'LIMIT', 0, limit) end

-- pipeline, then its queues: how it does, all at one moment.
function ops.overview(pipeline, ...)
  local queues = {}
  for i, queue in ipairs({...}) do
    local oldest = redis.call('ZRANGE', P .. ':wait:' .. queue, 0, 0, 'WITHSCORES')
    queues[i] = {redis.call('ZCARD', P .. ':wait:' .. queue), oldest[2] or ''}
  end
  local bounds = {}
  for i, bound in ipairs(BOUNDS) do bounds[i] = tostring(bound) end
  return {NOW, redis.call('ZCARD', P .. ':live:' .. pipeline), redis.call('HGETALL', P .. ':count:' .. pipeline),
    redis.call('HGETALL', P .. ':meter:' .. pipeline), redis.call('ZRANGE', P .. ':leases:' .. pipeline, 0, -1), queues,
    bounds}
end

-- Requests that routers have answered: names and amounts to add. Returns all of them.
function ops.traffic(...)
  if select('#', ...) > 0 then add(P .. ':traffic', {...}) end
  return redis.call('HGETALL', P .. ':traffic')
end

return function(_, args)
  local t = redis.call('TIME')
  P, now = args[2], tonumber(t[1]) + tonumber(t[2]) / 1e6
  NOW = stamp(now)
  return ops[args[1]](unpack(args, 3))
end
