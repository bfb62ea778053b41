//! The window over simulated paths, in virtual time.
//!
//! A path is a bottleneck that serves frames in order, and a round trip that may change. Senders
//! always have bytes; one is the session, others compete with a window of their own.

use super::{Delivery, Pacing};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

/// The limits of a chunk, which `credit` makes a part of the window.
const CHUNK: (u64, u64) = (64 << 10, 557_056);
const CAP: u64 = 120 * 557_056;

/// The path from a moment on.
#[derive(Clone, Copy)]
struct Phase {
    from: f64,
    /// Bytes per second; 0 in an outage, when frames wait for the next phase.
    rate: f64,
    /// Seconds.
    round_trip: f64,
    /// The bulk flow that shares the bottleneck.
    bulk: Bulk,
}

#[derive(Clone, Copy, PartialEq)]
enum Bulk {
    None,
    /// Keeps this many bytes in flight.
    Window(u64),
    /// Grows by a frame each round trip, and halves when the bottleneck's queue is longer than this
    /// many seconds (Reno over a deep buffer).
    Reno(f64),
}

fn path(from: f64, rate: f64, round_trip: f64) -> Phase {
    Phase { from, rate, round_trip, bulk: Bulk::None }
}

#[derive(PartialEq)]
struct Time(f64);
impl Eq for Time {}
impl PartialOrd for Time {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Time {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// The fate of the session's bytes.
struct Run {
    /// For each frame: when it was acknowledged, its bytes, and by how much the drain of the bytes
    /// then in flight exceeds the path's round trip, in seconds: the hidden downtime if the VM had
    /// stopped then.
    acked: Vec<(f64, u64, f64)>,
}

impl Run {
    /// Bytes per second between two moments.
    fn rate(&self, from: f64, to: f64) -> f64 {
        let bytes: u64 =
            self.acked.iter().filter(|(at, ..)| (from..to).contains(at)).map(|(_, n, _)| n).sum();
        bytes as f64 / (to - from)
    }

    /// The 95th percentile of the hidden downtime between two moments.
    fn hidden(&self, from: f64, to: f64) -> f64 {
        let mut hidden: Vec<f64> = self
            .acked
            .iter()
            .filter(|(at, ..)| (from..to).contains(at))
            .map(|(.., hidden)| *hidden)
            .collect();
        hidden.sort_by(f64::total_cmp);
        hidden[hidden.len() * 95 / 100]
    }
}

/// Runs a session over `phases`, from `begin` to `end`.
fn run(phases: &[Phase], begin: f64, end: f64) -> Run {
    let zero = Instant::now();
    let at = |seconds: f64| zero + Duration::from_secs_f64(seconds);
    let phase = |now: f64| *phases.iter().rev().find(|phase| phase.from <= now).unwrap();
    let mut pacing = Pacing::new(at(begin), CAP);
    // Arrival, flow (0: the session), bytes, time of sending.
    let mut acks: BinaryHeap<Reverse<(Time, usize, u64, Time)>> = BinaryHeap::new();
    let (mut free_at, mut last_ack) = (0.0f64, [0.0f64; 2]);
    let (mut in_flight, mut bulk_window, mut halved) = ([0u64; 2], 0.0f64, 0.0f64);
    let mut acked = Vec::new();
    let mut jitter = 0x9e37_79b9_7f4a_7c15u64;
    let mut now = 0.0;
    // Lets a competitor that starts late begin.
    let mut tick = 0.0;
    while now < end {
        let path = phase(now);
        let mut send = |who: usize, bytes: u64, in_flight: &mut [u64; 2]| {
            jitter ^= jitter << 13;
            jitter ^= jitter >> 7;
            jitter ^= jitter << 17;
            // Codec threads and schedulers: up to 2 ms.
            let work = (jitter % 1000) as f64 * 2e-6;
            // With a rate of 0, nothing is sent before the next phase.
            let (begin, rate) = match phases.iter().find(|phase| phase.from > now) {
                Some(next) if path.rate == 0.0 => (next.from, next.rate),
                _ => (now + work, path.rate),
            };
            free_at = free_at.max(begin) + bytes as f64 / rate;
            // Acknowledgements of one flow do not overtake each other.
            last_ack[who] = last_ack[who].max(free_at + path.round_trip);
            in_flight[who] += bytes;
            acks.push(Reverse((Time(last_ack[who]), who, bytes, Time(now))));
            free_at - now
        };
        loop {
            let window = pacing.window();
            let chunk = (window / pacing.chunks()).clamp(CHUNK.0, CHUNK.1);
            if now < begin {
                break;
            }
            if window.saturating_sub(in_flight[0]) < chunk && in_flight[0] > 0 {
                pacing.waited();
                break;
            }
            send(0, chunk, &mut in_flight);
        }
        match path.bulk {
            Bulk::None => bulk_window = 0.0,
            Bulk::Window(bytes) => bulk_window = bytes as f64,
            Bulk::Reno(_) => bulk_window = bulk_window.max(CHUNK.0 as f64),
        }
        while (in_flight[1] + CHUNK.0) as f64 <= bulk_window {
            let queue = send(1, CHUNK.0, &mut in_flight);
            if let Bulk::Reno(deepest) = path.bulk {
                if queue > deepest && now > halved + queue + path.round_trip {
                    bulk_window /= 2.0;
                    halved = now;
                }
            }
        }
        let next_ack = acks.peek().map_or(f64::INFINITY, |Reverse((Time(when), ..))| *when);
        if tick <= next_ack {
            now = tick;
            tick += 0.01;
            continue;
        }
        let Reverse((Time(when), who, bytes, Time(sent))) = acks.pop().unwrap();
        now = when;
        in_flight[who] -= bytes;
        if who == 0 {
            let latency = Duration::from_secs_f64(now - sent);
            let (first_bytes, in_flight) = (bytes, in_flight[0]);
            pacing.delivered(Delivery { now: at(now), bytes, latency, first_bytes, in_flight });
            acked.push((now, bytes, in_flight as f64 / path.rate - path.round_trip));
        } else {
            // One frame a round trip.
            bulk_window += (CHUNK.0 * CHUNK.0) as f64 / bulk_window.max(1.0);
        }
    }
    Run { acked }
}

/// Compares the session over `phases` with one that starts with the last phase: 5 s later it must
/// have 90 % of the other's final rate. `spans`: seconds after the last change.
fn recovers_over(name: &str, phases: &[Phase], spans: &[(f64, f64)]) -> Run {
    let last = phases.last().unwrap().from;
    let end = spans.last().unwrap().1;
    let session = run(phases, 0.0, last + end);
    let fresh = run(phases, last, last + end);
    let (from, to) = spans.last().unwrap();
    let theirs = fresh.rate(last + from, last + to);
    for (from, to) in spans {
        let ours = session.rate(last + from, last + to);
        println!(
            "{name}: {from} to {to} s after the change {:.1} MB/s, a fresh session {:.1}",
            ours / 1e6,
            theirs / 1e6
        );
        assert!(ours >= 0.9 * theirs, "{name}: {ours} B/s where a fresh session has {theirs}");
    }
    session
}

fn recovers(name: &str, phases: &[Phase]) -> Run {
    recovers_over(name, phases, &[(5.0, 7.0), (7.0, 15.0), (10.0, 25.0)])
}

/// The rates of a proxy; of 1 Gbit/s with pages that compress to a third; of 10 Gbit/s; of a slow
/// line.
const RATES: [f64; 4] = [62.5e6, 350e6, 1.2e9, 10e6];

#[test]
fn latency_that_rises_costs_5_s_at_most() {
    for rate in RATES {
        for to in [0.008, 0.014, 0.018, 0.02, 0.03, 0.05, 0.1] {
            // At several moments: the measurement that repeats every 10 s must not be the one that
            // helps.
            for (from, at) in [(0.0, 3.0), (0.0005, 6.0), (0.005, 9.7), (0.0005, 14.3)] {
                let name = format!("{} MB/s, {from} to {to} s at {at} s", rate / 1e6);
                recovers(&name, &[path(0.0, rate, from), path(at, rate, to)]);
            }
        }
    }
}

#[test]
fn latency_that_falls_again_costs_5_s_at_most_and_the_window_follows() {
    for rate in RATES {
        for high in [0.05, 0.1] {
            let phases = [path(0.0, rate, 0.0005), path(8.0, rate, high), path(24.0, rate, 0.0005)];
            let run = recovers(&format!("{} MB/s, back from {high} s", rate / 1e6), &phases);
            // Except where the least window exceeds the allowed queue (W16).
            if rate > 60e6 {
                for (from, to) in [(2.0, 8.0), (16.0, 24.0), (30.0, 49.0)] {
                    let hidden = run.hidden(from, to);
                    assert!(hidden < 0.02, "{rate} B/s, {from} to {to} s: {hidden} s are hidden");
                }
            }
        }
    }
}

#[test]
fn a_resumed_link_on_another_path_is_as_good_as_a_fresh_session() {
    let (fast, slow) = (350e6, 40e6);
    recovers("slower and longer", &[path(0.0, fast, 0.0005), path(7.0, slow, 0.08)]);
    recovers("faster and longer", &[path(0.0, slow, 0.0005), path(7.0, fast, 0.08)]);
    recovers("slower and shorter", &[path(0.0, fast, 0.08), path(7.0, slow, 0.0005)]);
    recovers("faster and shorter", &[path(0.0, slow, 0.08), path(7.0, fast, 0.0005)]);
    // Nothing arrives for 4 s in between.
    let away = path(7.0, 0.0, 0.0005);
    recovers("an outage", &[path(0.0, fast, 0.0005), away, path(11.0, slow, 0.05)]);
}

#[test]
fn a_competing_bulk_flow_leaves_what_a_fresh_session_gets() {
    for round_trip in [0.0005, 0.02, 0.1] {
        for bulk in [Bulk::Window(4 << 20), Bulk::Window(12 << 20), Bulk::Reno(0.2)] {
            let alone = path(0.0, 62.5e6, round_trip);
            let shared = Phase { from: 6.0, bulk, ..alone };
            // Reno oscillates: the spans must be longer than seconds.
            recovers_over("a bulk flow comes", &[alone, shared], &[(5.0, 65.0)]);
            let left = path(26.0, 62.5e6, round_trip);
            let run = recovers("a bulk flow goes", &[alone, shared, left]);
            // The minimum of the busy time is measured again within 10 s.
            let hidden = run.hidden(38.0, 51.0);
            assert!(hidden < 0.02, "{hidden} s are hidden once the bulk flow has gone");
        }
    }
}

#[test]
fn a_steady_path_is_full_and_hides_little() {
    for rate in RATES {
        for round_trip in [0.0, 0.0005, 0.01, 0.05, 0.1] {
            let steady = run(&[path(0.0, rate, round_trip)], 0.0, 120.0);
            let name = format!("{} MB/s, {round_trip} s", rate / 1e6);
            // The rate that the receiver's buffers and the window's cap allow.
            let most = rate.min(CAP as f64 / (round_trip + 0.001));
            let share = steady.rate(5.0, 120.0) / most;
            println!("{name}: {:.1} % of the path", 100.0 * share);
            assert!(share > 0.88, "{name}: {share}");
            if rate > 60e6 {
                // The minimum does not grow by the window's own queue.
                let hidden = steady.hidden(60.0, 120.0);
                assert!(hidden < 0.02, "{name}: {hidden} s are hidden");
            }
        }
    }
}
