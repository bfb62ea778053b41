//! The codecs are measured with a libqpl that has faults.

#[path = "../../../accel/qpl/tests/fake/mod.rs"]
#[expect(dead_code, reason = "other tests use the rest")]
mod fake;

use advise::{measure, Measured};
use codec::Settings;
use fake::{fake, Fault, INTERNAL};
use qpl::{Options, Qpl};
use std::sync::Arc;
use std::time::Duration;

const PATIENT: Options = Options { deadline: Duration::from_secs(300), verify_every: 1 };

/// Measures for `seconds` with a libqpl whose jobs fail from `number` on.
fn measured(number: u32, seconds: u64) -> Measured {
    let library = fake();
    let state = Arc::clone(&library.state);
    let qpl = Qpl::open(Arc::new(library), PATIENT).unwrap();
    *state.from.lock().unwrap() = Some((number, Fault::EndsWith(INTERNAL)));
    measure(None, None, Some(&qpl), Duration::from_secs(seconds)).unwrap()
}

/// libdeflate makes the streams that libqpl does not make. Its figures are not libqpl's.
#[test]
fn a_libqpl_that_fails_has_no_figures() {
    for number in [0, 4] {
        // A second has too few jobs on a busy machine.
        let mut found = [1, 10, 100].into_iter().map(|seconds| measured(number, seconds));
        let found = found.find(|found| found.qpl_failed.is_some()).unwrap();
        assert!(found.sampled.first.of(Settings::qpl()).is_none(), "from {number} on");
        let why = found.qpl_failed.as_deref().unwrap();
        assert!(why.contains("QPL_STS_LIBRARY_INTERNAL_ERR"), "{why}");
        assert!(found.sampled.first.zstd_1().is_some_and(|one| one.pages > 0));
    }
    let found = measured(u32::MAX, 1);
    assert!(found.sampled.first.of(Settings::qpl()).is_some_and(|one| one.pages > 0));
    assert_eq!(found.qpl_failed, None);
}
