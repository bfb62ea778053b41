//! The rules of QEMU's QATzip document on the choice between QATzip and QPL, and those that
//! platen's measurements add, applied to a host.

use crate::host::Accelerators;
use serde::Serialize;

/// A rule, and whether it holds here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Rule {
    /// The rule.
    pub rule: &'static str,
    /// Whether the rule applies here.
    pub applies: bool,
    /// Why the rule applies, or why not.
    pub because: String,
    /// Measurements of the rule.
    pub measured: &'static str,
}

/// Applies the rules. `iaa`: IAA devices that can be used; `bound_by_link`: QEMU alone would take
/// as long as the link takes for the pages; `alone_is_best`: nothing is faster than QEMU alone.
pub fn rules(
    found: &Accelerators,
    iaa: usize,
    bound_by_link: bool,
    alone_is_best: bool,
) -> Vec<Rule> {
    let qat = found.usable_qat();
    let counts = format!("{qat} usable QAT devices and {iaa} usable IAA devices");
    let link =
        if bound_by_link { "the link is the bottleneck" } else { "the link is no bottleneck" };
    let first = bound_by_link && qat > iaa;
    let second = qat > 0 && iaa > 0 && found.shared_memory() == Some(false);
    let shared = match found.shared_memory() {
        Some(true) => "the IAA devices use shared virtual memory",
        Some(false) => "an IAA device does without shared virtual memory",
        None => "no driver of an IAA device tells whether it uses shared virtual memory",
    };
    let third = iaa > 0 && !first && !second;
    vec![
        Rule {
            rule: "qatzip where the network limits the migration and there is more QAT than IAA",
            applies: first,
            because: format!("{link}; {counts}"),
            measured:
                "on a simulated device platen's source relay alone took 0.24 of its CPU time with \
                 zstd 1 (docs/figures.md); relay and QEMU together took 0.61 of the CPU time of \
                 QEMU's zstd, in a smaller guest (docs/report); no QAT hardware has run platen",
        },
        Rule {
            rule: "qatzip instead of qpl where there is no shared virtual memory",
            applies: second,
            because: format!("{counts}; {shared}"),
            measured: "not measured: no IAA hardware has been at hand",
        },
        Rule {
            rule: "qpl in all other cases",
            applies: third,
            because: if third {
                format!(
                    "{counts}: `platen migrate --codec qpl`, or multifd-compression qpl of a QEMU \
                         from 9.1 on that was built with it"
                )
            } else {
                counts
            },
            measured: "not measured: no IAA hardware has been at hand",
        },
        Rule {
            rule: "no compression where the link carries the pages sooner than cores compress them",
            applies: alone_is_best,
            because: if alone_is_best {
                "nothing is faster than QEMU alone"
            } else {
                "compression gains time"
            }
            .into(),
            measured: "with two cores for both ends QEMU alone is faster from about 5.5 Gbit/s on \
                       (docs/figures.md)",
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{Iaa, Qat};

    fn devices(qat: usize, iaa: usize, shared_memory: Option<bool>) -> Accelerators {
        let one = |nth: usize| format!("0000:{nth:02x}:00.0");
        let qat = (0..qat).map(|nth| Qat { address: one(nth), part: "4xxx".into(), driver: None });
        let iaa = (0..iaa).map(|nth| Iaa {
            address: one(nth),
            driver: None,
            enabled: Some(true),
            shared_memory,
        });
        Accelerators { qat: qat.collect(), qat_lacks: Vec::new(), iaa: iaa.collect() }
    }

    fn applied(found: &Accelerators, bound_by_link: bool) -> Vec<bool> {
        rules(found, found.iaa.len(), bound_by_link, false)
            .iter()
            .map(|rule| rule.applies)
            .collect()
    }

    #[test]
    fn the_document_s_three_cases() {
        assert_eq!(applied(&devices(4, 1, Some(true)), true), [true, false, false, false]);
        assert_eq!(applied(&devices(1, 4, Some(false)), true), [false, true, false, false]);
        assert_eq!(applied(&devices(1, 4, Some(true)), true), [false, false, true, false]);
        assert_eq!(applied(&devices(4, 1, Some(true)), false), [false, false, true, false]);
        assert_eq!(applied(&devices(0, 0, None), true), [false; 4]);
    }

    /// A device that lacks its driver is none.
    #[test]
    fn a_device_that_cannot_be_used_does_not_count() {
        let mut found = devices(4, 0, None);
        found.qat_lacks.push("an IOMMU".into());
        assert_eq!(applied(&found, true), [false; 4]);
        // IAA devices of a host without libqpl.
        let found = devices(4, 2, Some(true));
        let applied = rules(&found, found.usable_iaa(None), true, false);
        let applied: Vec<bool> = applied.iter().map(|rule| rule.applies).collect();
        assert_eq!(applied, [true, false, false, false]);
    }
}
