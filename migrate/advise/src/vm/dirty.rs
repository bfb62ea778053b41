//! How fast a guest writes, by QEMU's `calc-dirty-rate` in its sampling mode.

use super::error::{nonsense, VmError};
use forecast::Pass;
use qmp::{Qmp, QmpError};
use serde_json::{json, Value};
use std::time::{Duration, Instant};

/// The measured times, seconds. Two differ, to detect a guest that writes to the same pages again.
const TIMES: [u64; 2] = [1, 5];
/// Milliseconds of a further measurement, if QEMU accepts milliseconds (8.2 and later).
const SHORT: u64 = 200;
/// The most pages for each GiB that QEMU accepts for hashing, and the fewest.
const SAMPLES: (u64, u64) = (4096, 128);
/// Pages that are hashed in all, approximately.
const PAGES: u64 = 65_536;
const MIB: f64 = 1_048_576.0;
/// The interval between two questions.
const ASK: Duration = Duration::from_millis(50);
/// How much longer than requested a measurement may take: QEMU hashes pages before and after.
const PATIENCE: Duration = Duration::from_secs(120);

/// The measurement of a guest's writes.
#[derive(Clone, Debug, Default)]
pub struct Dirtying {
    /// Bytes of distinct pages, by time. QEMU reports whole MiB a second, so these are the middle
    /// of each range, but for 0.
    pub passes: Vec<Pass>,
    /// The rate that a figure of 0 may hide, bytes per second.
    pub unseen: f64,
}

/// Measures for some seconds how many bytes a guest of `ram` bytes writes to, while `go_on` returns
/// true.
///
/// # Errors
/// The monitor fails, another client is measuring, or the user ended the measurement.
pub fn dirtying(qmp: &mut Qmp, ram: u64, go_on: &dyn Fn() -> bool) -> Result<Dirtying, VmError> {
    let gib = (ram >> 30).max(1);
    let samples = (PAGES / gib).clamp(SAMPLES.1, SAMPLES.0);
    let mut passes = Vec::new();
    let short =
        json!({"calc-time": SHORT, "calc-time-unit": "millisecond", "sample-pages": samples});
    match measure(qmp, short, Duration::from_millis(SHORT), go_on) {
        Ok(pass) => passes.push(pass),
        // QEMU is older.
        Err(VmError::Monitor(QmpError::Refused { desc, .. }))
            if desc.contains("calc-time-unit") => {}
        Err(error) => return Err(error),
    }
    for seconds in TIMES {
        let asked = json!({"calc-time": seconds, "sample-pages": samples});
        passes.push(measure(qmp, asked, Duration::from_secs(seconds), go_on)?);
    }
    Ok(Dirtying { passes, unseen: MIB })
}

fn measure(
    qmp: &mut Qmp,
    asked: Value,
    time: Duration,
    go_on: &dyn Fn() -> bool,
) -> Result<Pass, VmError> {
    const QUERY: &str = "query-dirty-rate";
    if qmp.execute(QUERY, None)?["status"] == "measuring" {
        return Err(VmError::Measuring);
    }
    qmp.execute("calc-dirty-rate", Some(asked))?;
    let begun = Instant::now();
    loop {
        std::thread::sleep(ASK);
        if !go_on() {
            // QEMU's measurement ends by itself.
            return Err(VmError::Interrupted);
        }
        let answer = qmp.execute(QUERY, None)?;
        if answer["status"] == "measured" && begun.elapsed() >= time {
            return pass(&answer, time);
        }
        if begun.elapsed() > time + PATIENCE {
            let (seconds, waited) = (time.as_secs(), begun.elapsed().as_secs());
            return Err(VmError::Endless { seconds, waited });
        }
    }
}

/// The bytes of an answer, which is in whole MiB a second, rounded down. An answer of zero stays
/// zero.
fn pass(answer: &Value, time: Duration) -> Result<Pass, VmError> {
    /// 64 GiB a second.
    const MOST: i64 = 65_536;
    let rate = answer["dirty-rate"].as_i64().filter(|rate| (0..=MOST).contains(rate));
    let rate = rate.ok_or_else(|| nonsense("query-dirty-rate", &answer.to_string()))?;
    #[expect(clippy::cast_precision_loss, reason = "at most 65536")]
    let rate = if rate == 0 { 0.0 } else { rate as f64 + 0.5 };
    Ok(Pass { seconds: time.as_secs_f64(), bytes: rate * MIB * time.as_secs_f64() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_bytes_or_nonsense() {
        let of = |rate: Value| {
            pass(&json!({"status": "measured", "dirty-rate": rate}), Duration::from_secs(2))
        };
        assert!((of(json!(3)).unwrap().bytes - 7.0 * MIB).abs() < 1.0);
        assert!(of(json!(0)).unwrap().bytes.abs() < 1e-9);
        for bad in [json!(-1), json!(1_u64 << 60), json!("x"), json!(null), json!(1.5)] {
            let error = of(bad.clone()).unwrap_err().to_string();
            assert!(error.contains("query-dirty-rate"), "{bad}: {error}");
        }
    }
}
