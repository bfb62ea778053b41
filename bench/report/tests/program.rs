//! The program `report` itself, beside programs that stand for the benchmarks: Ctrl-C, and what it
//! says of its progress; and what `make report` does before it.

mod stage;

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use report::plan;
use report::record::{Record, State};
use rustix::process::{kill_process, Pid, Signal};
use stage::Stage;

/// `report`, ended with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the program in a folder of builds in which `script` stands for platen-bench.
fn start(script: &str, steps: &str) -> (Stage, Running) {
    let stage = Stage::new(&[("target/release/platen-bench", script)]);
    let program = stage.path("target/release/report");
    // By another process, as the scripts are written: see there.
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_report")).arg(&program).status();
    assert!(copied.unwrap().success());
    let child = Command::new(&program)
        .args(["--quick", "--only", steps, "--out"])
        .arg(stage.path("out"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    (stage, Running(child))
}

/// The status, standard output and standard error, once it has ended.
fn end(running: &mut Running) -> (Option<i32>, String, String) {
    let child = &mut running.0;
    let (mut out, mut error) = (String::new(), String::new());
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
    (child.wait().unwrap().code(), out, error)
}

fn record(stage: &Stage) -> Record {
    serde_json::from_slice(&fs::read(stage.path("out/data/run.json")).unwrap()).unwrap()
}

#[test]
fn ctrl_c_ends_the_step_and_leaves_a_report_of_what_there_is() {
    let script = "case \"$1\" in codec) echo '{}' > \"$file\"; exit;; esac\n\
         trap 'touch cleaned; exit 1' TERM\n\
         touch begun\n\
         for turn in $(seq 6000); do sleep 0.1; done";
    let (stage, mut running) = start(script, "codec,pool,hop");
    while !stage.path("begun").exists() {
        assert!(running.0.try_wait().unwrap().is_none(), "{:?}", end(&mut running));
        std::thread::sleep(Duration::from_millis(10));
    }
    kill_process(Pid::from_child(&running.0), Signal::INT).unwrap();
    let (status, out, error) = end(&mut running);
    assert_eq!(status, Some(130), "{out}{error}");
    assert!(error.contains("interrupted: the step ends"), "{error}");
    assert!(out.ends_with("index.html\n"), "{out}");
    assert!(stage.path("cleaned").exists());
    assert!(!stage.path("out/data/pool.part").exists());
    let record = record(&stage);
    assert!(record.interrupted && !record.complete);
    let states: Vec<State> = record.steps.iter().map(|step| step.state).collect();
    assert_eq!(states, [State::Done, State::Interrupted]);
    assert!(stage.page().contains("The run was interrupted"));
}

/// Seconds, or minutes rounded up, as the program shows them.
fn shown(seconds: f64) -> String {
    let seconds = Duration::from_secs_f64(seconds).as_secs();
    match seconds {
        0..=99 => format!("{seconds} s"),
        _ => format!("{} min", seconds.div_ceil(60)),
    }
}

/// Before the first step the plan tells how long it takes; then the pace of the steps so far.
#[test]
fn progress_is_told_with_an_estimate_that_follows_this_machine() {
    let (stage, mut running) = start("echo '{}' > \"$file\"", "codec,pool,hop");
    let (status, out, error) = end(&mut running);
    assert_eq!(status, Some(0), "{out}{error}");
    let planned = plan::steps(true, "text", &stage.path("target"));
    let names = ["codec", "pool", "hop"];
    let planned = names.map(|name| planned.iter().find(|step| step.name == name).unwrap());
    let expected = planned.map(|step| step.expected as f64);
    let record = record(&stage);
    assert!(record.complete && !record.interrupted);
    let taken: Vec<f64> = record.steps.iter().map(|step| step.seconds).collect();
    let mut lines = out.lines().skip_while(|line| !line.starts_with('['));
    let (mut planned_so_far, mut taken_so_far) = (0.0, 0.0_f64);
    for (nth, step) in planned.iter().enumerate() {
        let pace = match nth {
            0 => 1.0,
            _ => (taken_so_far / planned_so_far).clamp(0.25, 8.0),
        };
        let about = shown(expected[nth] * pace);
        let begins = format!("[{} of 3] {}: about {about}; ", nth + 1, step.title);
        let line = lines.next().unwrap();
        assert!(line.starts_with(&begins) && line.ends_with(" left"), "{line}, not {begins}");
        if nth == 0 {
            let all: f64 = expected.iter().sum();
            assert!(line.ends_with(&format!("; {} left", shown(all))), "{line}");
        }
        assert_eq!(lines.next().unwrap(), format!("    done in {}", shown(taken[nth])));
        planned_so_far += expected[nth];
        taken_so_far += taken[nth];
    }
}

/// Regression: `make report` fetched the parts of the swap guests and not libqpl, so that the
/// report of a fresh clone had no row of codec qpl.
#[test]
fn make_report_fetches_what_its_steps_need() {
    let makefile = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Makefile");
    let text = fs::read_to_string(makefile).unwrap();
    let (_, recipe) = text.split_once("\nreport: ").unwrap();
    let (recipe, _) = recipe.split_once("\n\n").unwrap();
    let at = |words: &str| recipe.find(words).unwrap_or_else(|| panic!("no {words} in {recipe}"));
    for part in ["fetch-qemu 10", "fetch-linux612", "fetch-qpl"] {
        // Without the part the report says what it lacks.
        assert!(at(&format!("@scripts/{part} || true\n")) < at("@scripts/report"), "{part}");
    }
}

/// Regression: a run of one step (`--only`) replaced the published samples of all steps.
#[test]
fn only_a_complete_run_of_all_steps_is_published() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/report");
    for (mode, complete, is_published) in
        [("partial", true, false), ("full", false, false), ("full", true, true)]
    {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir_all(path("scripts")).unwrap();
        fs::create_dir_all(path("target/report/data")).unwrap();
        fs::copy(&source, path("scripts/report")).unwrap();
        fs::write(path("target/report/index.html"), "page").unwrap();
        let record = Record { mode: mode.into(), complete, ..Record::default() };
        let record = serde_json::to_string_pretty(&record).unwrap();
        fs::write(path("target/report/data/run.json"), record).unwrap();
        let done = Command::new("sh").arg(path("scripts/report")).arg("--commit").output().unwrap();
        assert_eq!(done.status.success(), is_published, "{mode} {complete} {done:?}");
        assert_eq!(path("docs/report/index.html").exists(), is_published, "{mode} {complete}");
    }
}
