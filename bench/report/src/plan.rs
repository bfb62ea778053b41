//! The plan: one benchmark after the other, quick or full.

use std::path::Path;

/// A benchmark to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The name of its file, without `.json`.
    pub name: &'static str,
    /// Its subject.
    pub title: &'static str,
    /// A program beside this one.
    pub program: &'static str,
    /// Its arguments, but for `--json FILE`.
    pub arguments: Vec<String>,
    /// Seconds that it takes on two CPUs without other work.
    pub expected: u64,
    /// A script that runs the program, where it needs one.
    pub through: Option<&'static str>,
    /// Its conditions besides its program.
    pub needs: &'static [Need],
}

/// A condition of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// The system's QEMU.
    Qemu,
    /// The guests that swap: QEMU 10 and Linux 6.12, which scripts/fetch-qemu and
    /// scripts/fetch-linux612 fetch.
    SwapGuests,
}

impl Need {
    /// Why it is not met; `None` if it is. `target` is the folder of builds and fetched parts.
    pub fn missing(self, target: &Path) -> Option<String> {
        match self {
            Self::Qemu => {
                let folders = std::env::var_os("PATH").unwrap_or_default();
                let found = std::env::split_paths(&folders)
                    .any(|folder| folder.join("qemu-system-x86_64").is_file());
                (!found)
                    .then(|| "qemu-system-x86_64 is not installed (scripts/setup does it)".into())
            }
            Self::SwapGuests => [
                ("qemu10/qemu-system-x86_64", "scripts/fetch-qemu 10"),
                ("linux612/.complete", "scripts/fetch-linux612"),
            ]
            .into_iter()
            .find(|(file, _)| !target.join(file).exists())
            .map(|(file, script)| format!("{file} is not there ({script} fetches it)")),
        }
    }
}

/// The time in which all steps must have ended, seconds.
pub fn budget(quick: bool) -> u64 {
    if quick {
        600
    } else {
        3600
    }
}

/// All steps, those first that need the least. `calgary` is the set of pages for what the QZRAM
/// paper measured with Calgary's files. Codec qpl is among the codecs where `target` has the libqpl
/// that scripts/fetch-qpl fetches.
pub fn steps(quick: bool, calgary: &str, target: &Path) -> Vec<Step> {
    let has_qpl = target.join("qpl/.complete").exists();
    let mut steps = engine(quick, has_qpl);
    steps.extend(memory(quick, calgary));
    steps.extend(migrations(quick, has_qpl));
    steps.extend(guests(quick));
    steps.extend(advice(quick));
    steps
}

/// The predictions of `platen advise`, which a quick run has no time for.
fn advice(quick: bool) -> Option<Step> {
    let advise = step(
        "advise",
        "migrations that platen advise has predicted",
        "advise_bench --limit 60",
        450,
        &[Need::Qemu],
    );
    (!quick).then_some(advise)
}

fn step(
    name: &'static str,
    title: &'static str,
    command: &str,
    expected: u64,
    needs: &'static [Need],
) -> Step {
    let mut words = command.split_whitespace().map(String::from);
    let program = match words.next().as_deref() {
        Some("migration_bench") => "migration_bench",
        Some("swap_latency") => "swap_latency",
        Some("demo_memory") => "demo_memory",
        Some("advise_bench") => "advise_bench",
        _ => "platen-bench",
    };
    Step { name, title, program, arguments: words.collect(), expected, through: None, needs }
}

/// `quick` or `full`, by the mode.
fn by<'a>(is_quick: bool, quick: &'a str, full: &'a str) -> &'a str {
    if is_quick {
        quick
    } else {
        full
    }
}

fn engine(quick: bool, has_qpl: bool) -> Vec<Step> {
    let codec = by(quick, "--mib 24 --runs 3", "--mib 64 --runs 5");
    let pool = by(quick, "--mib 32 --runs 3", "--mib 64 --runs 5");
    let hop = by(
        quick,
        "--mib 256 --runs 1 --channels 0,2,8 --codecs none,zstd",
        "--mib 512 --runs 3 --channels 0,2,4,8",
    );
    let codecs = "lz4,zstd:-1,zstd:1,zstd:3,zlib:1,zlib:6,qatzip:1";
    let qpl = if has_qpl { ",qpl" } else { "" };
    let mut alone = step(
        "codec",
        "the codecs alone",
        &format!("platen-bench codec {codec} --codecs {codecs}{qpl}"),
        if quick { 22 } else { 90 },
        &[],
    );
    alone.through = has_qpl.then_some("with-qpl");
    vec![
        alone,
        step(
            "pool",
            "QEMU's old threads and platen's pool",
            &format!("platen-bench pool --only table {pool}"),
            if quick { 35 } else { 110 },
            &[],
        ),
        step(
            "hop",
            "the relays alone",
            &format!("platen-bench hop --tls {hop}"),
            if quick { 25 } else { 180 },
            &[],
        ),
    ]
}

fn memory(quick: bool, calgary: &str) -> Vec<Step> {
    let fronts = "zram:lzo,zram:lzo-rle,zram:lz4,lz4,zstd:1,zlib:1";
    let few = "zram:lzo-rle,zram:lz4,lz4,zstd:1";
    let pages = by(quick, "--pages 6000 --runs 2", "--runs 5");
    let jobs = by(quick, "--pages 4000 --runs 1 --jobs 1,4,16", "--pages 12000 --runs 5");
    let requests = by(
        quick,
        "--pages 3000 --runs 1 --qat-requests 4,64,4096 --jobs 1,4,16",
        "--pages 8000 --runs 3",
    );
    vec![
        step(
            "pages",
            "pages beside zram",
            &format!(
                "platen-bench device --parts pages --sets guest,{calgary} --fronts {fronts} \
                      {pages}"
            ),
            if quick { 15 } else { 90 },
            &[],
        ),
        step(
            "jobs",
            "patterns and jobs beside zram",
            &format!("platen-bench device --parts jobs --sets guest --fronts {few} {jobs}"),
            if quick { 10 } else { 90 },
            &[],
        ),
        step(
            "requests",
            "requests by size, and jobs, on a simulated QAT device",
            &format!(
                "platen-bench device --parts qat,jobs --sets guest --fronts zram:lzo-rle \
                      {requests}"
            ),
            if quick { 30 } else { 200 },
            &[],
        ),
    ]
}

fn migrations(quick: bool, has_qpl: bool) -> Vec<Step> {
    let size = by(quick, "--data 200 --rounds 1", "--data 600 --rounds 3");
    let channels = by(
        quick,
        "qemu-multifd8-none qemu-multifd8-zstd platen:codec=zstd,channels=8 \
         platen-qatzip-simulated",
        "qemu-multifd8-none qemu-multifd2-zstd qemu-multifd8-zstd platen:codec=zstd,channels=2 \
         platen:codec=zstd,channels=8 platen-default platen-qatzip-software \
         platen-qatzip-simulated",
    );
    let channels = channels.to_owned() + if has_qpl { " platen-qpl-software" } else { "" };
    let threads =
        "qemu qemu-compress platen:codec=zlib,level=1,channels=0,compress-threads=8 platen-default";
    let writing = by(quick, "--dirty 8000,100,48", "--dirty 10000,100,128");
    let limit = by(quick, "--limit 40", "--limit 90");
    let bench = "migration_bench --prealloc";
    let mut steps = vec![
        step(
            "channels",
            "migrations over multifd channels",
            &format!("{bench} {size} --link 1000 --methods {channels}"),
            if quick { 50 } else { 360 },
            &[Need::Qemu],
        ),
        step(
            "compress-idle",
            "compression threads, an idle guest",
            &format!("{bench} {size} --link 1000 --methods {threads}"),
            if quick { 40 } else { 160 },
            &[Need::Qemu],
        ),
        step(
            "compress-writing",
            "compression threads, a guest that writes",
            &format!("{bench} {size} --link 1000 {writing} {limit} --methods {threads}"),
            if quick { 70 } else { 330 },
            &[Need::Qemu],
        ),
    ];
    if !quick {
        steps.push(step(
            "links",
            "migrations over a fast link",
            &format!("{bench} {size} --link 10000 --methods qemu platen-default"),
            70,
            &[Need::Qemu],
        ));
    }
    steps
}

fn guests(quick: bool) -> Vec<Step> {
    let redis = by(quick, "--of-memory 110", "--qat");
    let mut swap = step(
        "swap",
        "swap-ins in a guest",
        "swap_latency --runs",
        if quick { 90 } else { 800 },
        &[Need::SwapGuests],
    );
    // A kind's name has spaces.
    let kinds: &[&str] = if quick { &["1", "--only", "lz4, 1 thread"] } else { &["2"] };
    swap.arguments.extend(kinds.iter().map(|word| String::from(*word)));
    let redis = step(
        "redis",
        "redis beyond its guest's memory",
        &format!("demo_memory {redis}"),
        if quick { 150 } else { 480 },
        &[Need::SwapGuests],
    );
    vec![redis, swap]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_step_has_a_file_of_its_own_and_all_fit_into_the_budget() {
        for quick in [true, false] {
            let folder = tempfile::tempdir().unwrap();
            let steps = steps(quick, "text", folder.path());
            let names: BTreeSet<_> = steps.iter().map(|step| step.name).collect();
            assert_eq!(names.len(), steps.len());
            let expected: u64 = steps.iter().map(|step| step.expected).sum();
            assert!(expected < budget(quick) * 95 / 100, "{expected} s");
        }
        let folder = tempfile::tempdir().unwrap();
        let quick = steps(true, "text", folder.path());
        let swap = quick.iter().find(|step| step.name == "swap").unwrap();
        assert_eq!(swap.arguments, ["--runs", "1", "--only", "lz4, 1 thread"]);
    }

    #[test]
    fn codec_qpl_is_measured_where_its_library_was_fetched() {
        let folder = tempfile::tempdir().unwrap();
        let words = |steps: &[Step]| {
            let of = |name: &str| steps.iter().find(|step| step.name == name).cloned().unwrap();
            (of("codec"), of("channels").arguments)
        };
        let (codec, channels) = words(&steps(true, "text", folder.path()));
        assert!(codec.through.is_none() && !codec.arguments.concat().contains("qpl"));
        assert!(!channels.contains(&"platen-qpl-software".to_owned()), "{channels:?}");
        std::fs::create_dir(folder.path().join("qpl")).unwrap();
        std::fs::write(folder.path().join("qpl/.complete"), "").unwrap();
        let (codec, channels) = words(&steps(true, "text", folder.path()));
        assert_eq!(codec.through, Some("with-qpl"));
        assert!(codec.arguments.concat().ends_with(",qpl"), "{codec:?}");
        assert!(channels.contains(&"platen-qpl-software".to_owned()), "{channels:?}");
    }

    #[test]
    fn what_was_not_fetched_is_named_with_its_script() {
        let folder = tempfile::tempdir().unwrap();
        let why = Need::SwapGuests.missing(folder.path()).unwrap();
        assert!(why.contains("scripts/fetch-qemu 10"), "{why}");
        std::fs::create_dir(folder.path().join("qemu10")).unwrap();
        std::fs::write(folder.path().join("qemu10/qemu-system-x86_64"), "").unwrap();
        assert!(Need::SwapGuests.missing(folder.path()).unwrap().contains("fetch-linux612"));
    }
}
