//! `platen host intercept`: redirects QEMU's connections to the migration ports of the other hosts
//! to their doors, by rules of nftables in a table of platen's own.
//!
//! The service learns the original destination of a connection from the kernel. The service's own
//! connections are not redirected: its user is in no rule, and as root it marks them.

mod redirect;
mod rules;

use super::settings::Settings;
use super::status::{self, HostStatus};
use super::users::by_name_if_possible;
use super::ServiceArgs;
use crate::device::control::Silent;
use crate::say::show;
use anyhow::{bail, Context};
use clap::{Args, ValueEnum};
use rules::Rules;
use std::io::Write;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// Possible paths of nftables' program. PATH is not used, since root runs the program.
const PROGRAMS: [&str; 4] = ["/usr/sbin/nft", "/usr/bin/nft", "/sbin/nft", "/usr/local/sbin/nft"];
/// How long a service that has just started may take to open its doors.
const OPENS: Duration = Duration::from_secs(10);
/// How long a service that gets no CPU is asked again.
const ANSWERS: Duration = Duration::from_secs(60);
const REFUSED: &str =
    "intercept_stopped = \"refuse\": migrations fail at once until the service runs again";
/// Pause before the service is asked again.
const ASK: Duration = Duration::from_millis(100);

/// Operation on the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// Install them
    On,
    /// Remove them
    Off,
    /// Apply `intercept_stopped`: for the service's unit, when the service has ended
    Stopped,
}

#[derive(Args)]
pub(super) struct InterceptArgs {
    /// Install the rules (on), remove them (off), or apply intercept_stopped (stopped: for the
    /// service's unit, when the service has ended)
    #[arg(value_enum, value_name = "on|off|stopped", hide_possible_values = true)]
    what: What,
    #[command(flatten)]
    service: ServiceArgs,
}

pub(super) fn run(args: &InterceptArgs) -> anyhow::Result<ExitCode> {
    let said = match args.what {
        What::On => on(&args.service)?,
        What::Off => off()?,
        What::Stopped => stopped(&args.service)?,
    };
    show(&said)?;
    Ok(ExitCode::SUCCESS)
}

fn on(service: &ServiceArgs) -> anyhow::Result<String> {
    let settings = Settings::new(service).map_err(|error| {
        // At least those of the other users are refused.
        match Settings::new_by(service, &by_name_if_possible) {
            Ok(settings) => refuse_instead(&Rules::new(&settings, rules::addresses), error),
            Err(_) => error,
        }
    })?;
    if settings.intercepted().next().is_none() {
        wait_for_adoption(service, &settings)?;
        off()?;
        return Ok("no other [[host]] has `intercept`: nothing is intercepted\n".into());
    }
    let rules = Rules::new(&settings, rules::addresses);
    lead(service, &settings, &rules).map_err(|error| match is_unadopted(service, &settings) {
        true => error,
        false => refuse_instead(&rules, error),
    })?;
    let names: Vec<_> = rules.known.iter().map(String::as_str).collect();
    let said = format!("migrations to {} are intercepted\n", names.join(", "));
    if let Some(why) = rules.why_not_all() {
        show(&said)?;
        bail!(why);
    }
    Ok(said)
}

/// Installs the rules.
fn lead(service: &ServiceArgs, settings: &Settings, rules: &Rules) -> anyhow::Result<()> {
    opened(service, settings)?;
    if let Some(why) = rules.would_lose(&table()?.unwrap_or_default()) {
        bail!(why);
    }
    nft(&["-f", "-"], &rules.on()).map(drop)
}

/// Whether a service runs that has another configuration, and leads migrations by that one.
fn is_unadopted(service: &ServiceArgs, settings: &Settings) -> bool {
    status::ask_soon(service, status::LIST)
        .is_ok_and(|(_, status)| adopted(&status, settings).is_err())
}

/// Refuses migrations, where `intercept_stopped` says so and no rule is in force: the unit runs
/// `on` once, and without a rule they would go in the clear.
fn refuse_instead(rules: &Rules, error: anyhow::Error) -> anyhow::Error {
    let refused = table().and_then(|listed| match rules.instead_of_on(listed.as_deref()) {
        Some(text) => nft(&["-f", "-"], &text).map(|_| true),
        None => Ok(false),
    });
    match refused {
        Ok(false) => error,
        Ok(true) => error.context(REFUSED),
        Err(other) => error.context(format!("migrations go in the clear: {other:#}")),
    }
}

/// Refuses a configuration that differs from the one that the service has adopted.
fn adopted(status: &HostStatus, settings: &Settings) -> anyhow::Result<()> {
    match &status.intercept {
        Some(theirs) if *theirs != settings.interception() => bail!(
            "the service uses another configuration than the file: it has refused its last reload, or was not asked \
             for one (systemctl reload platen). The rules stay as they are"
        ),
        _ => Ok(()),
    }
}

/// Waits until a service that runs has adopted the configuration: its unit calls this right behind
/// SIGHUP, for which the service looks ten times a second.
fn wait_for_adoption(service: &ServiceArgs, settings: &Settings) -> anyhow::Result<()> {
    let begun = Instant::now();
    loop {
        let adopted = match status::ask_soon(service, status::LIST) {
            Ok((_, status)) => adopted(&status, settings),
            Err(error) if error.is::<Silent>() => Err(error),
            // Without a service there is nothing that could contradict the configuration.
            Err(_) => Ok(()),
        };
        if adopted.is_ok() || begun.elapsed() > OPENS {
            return adopted;
        }
        std::thread::sleep(ASK);
    }
}

/// Waits until the service has adopted the configuration and has all of its doors: a rule that
/// redirects to another process's port would deliver VMs to that process.
fn opened(service: &ServiceArgs, settings: &Settings) -> anyhow::Result<()> {
    let doors = settings.doors().count() as u64;
    let begun = Instant::now();
    loop {
        match status::ask_soon(service, status::LIST) {
            Ok((_, status)) => {
                let adopted = adopted(&status, settings);
                if adopted.is_ok() && status.doors == doors {
                    return Ok(());
                }
                if begun.elapsed() > OPENS {
                    adopted?;
                    bail!(
                        "the service has opened {} of its {doors} doors, and nothing is led to \
                         them before it has all: another process may hold one (`platen doctor`)",
                        status.doors
                    );
                }
            }
            // Its unit runs this once, and without the rules migrations would go in the clear.
            Err(error) if error.is::<Silent>() && begun.elapsed() <= ANSWERS => {}
            Err(error) => return Err(error),
        }
        std::thread::sleep(ASK);
    }
}

fn off() -> anyhow::Result<String> {
    if table()?.is_some() {
        nft(&["-f", "-"], &rules::off())?;
    }
    Ok("no migration is intercepted\n".into())
}

/// Applies the value of `intercept_stopped` that `on` has left in the table. After a boot there is
/// none, and the configuration says what a service that cannot start would have left.
fn stopped(service: &ServiceArgs) -> anyhow::Result<String> {
    let listed = table()?;
    // With a table no name is looked up: the redirects lead nowhere by now.
    let configured = match &listed {
        Some(_) => Ok(Rules::default()),
        // libvirt connects as root: what a user who cannot be looked up would do is no reason to
        // refuse nothing.
        None => Settings::new_by(service, &by_name_if_possible)
            .map(|settings| Rules::new(&settings, rules::addresses)),
    };
    let Some(text) = rules::stopped(listed.as_deref(), configured.as_ref().ok()) else {
        off()?;
        configured.context("nothing is refused, whatever intercept_stopped says")?;
        return Ok("no migration is intercepted\n".into());
    };
    nft(&["-f", "-"], &text)?;
    Ok(format!("{REFUSED}; `platen host intercept off` lets them go the old way\n"))
}

/// The table as nft lists it; `None` if there is no table or no nft.
fn table() -> anyhow::Result<Option<String>> {
    if program().is_none() {
        return Ok(None);
    }
    let tables = nft(&["list", "tables"], "")?;
    match tables.lines().any(|line| line == "table ip platen") {
        true => nft(&["-n", "list", "table", "ip", "platen"], "").map(Some),
        false => Ok(None),
    }
}

fn program() -> Option<&'static Path> {
    PROGRAMS.iter().map(Path::new).find(|path| path.is_file())
}

/// Runs nft, and returns its output.
fn nft(words: &[&str], text: &str) -> anyhow::Result<String> {
    let program = program().context("there is no nft here: install the package nftables")?;
    let mut child = Command::new(program)
        .args(words)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| program.display().to_string())?;
    if let Some(mut input) = child.stdin.take() {
        // A program that stops reading prints the reason itself.
        let _ = input.write_all(text.as_bytes());
    }
    let out = child.wait_with_output().context("nft")?;
    if !out.status.success() {
        bail!("nft refuses: {}", String::from_utf8_lossy(&out.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// The hosts, by their names, to whose doors the rules do not redirect as the configuration says;
/// `None` if it intercepts nothing.
pub(super) fn missing(settings: &Settings) -> Option<anyhow::Result<Vec<String>>> {
    settings.intercepted().next()?;
    let listed = match program() {
        Some(_) => table().map(Option::unwrap_or_default),
        None => Err(anyhow::anyhow!("there is no nft here: install the package nftables")),
    };
    Some(listed.map(|listed| Rules::new(settings, rules::addresses).missing_in(&listed)))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::device::control;
    use host::Policy;
    use relay::UnixAddress;
    use std::sync::atomic::{AtomicUsize, Ordering};

    pub(super) fn settings(of_b: &str) -> Settings {
        let text = format!(
            "allow_users = [\"64055\"]\n[[host]]\nname = \"a\"\ndoor = \"127.80.0.1\"\n\
             ports = \"100-109\"\nintercept = \"60000-60001\"\n[[host]]\nname = \"b\"\naddress = \"10.0.0.2\"\n\
             door = \"127.80.0.2\"\nports = \"110-119\"\n{of_b}"
        );
        Settings::given(host::Config::parse(&text).unwrap(), "a".into()).unwrap()
    }

    #[test]
    fn rules_follow_only_a_configuration_that_the_service_has_adopted() {
        let (old, new) = (settings(""), settings("intercept = \"60000-60001\"\n"));
        let status = |intercept| HostStatus { intercept, ..HostStatus::default() };
        adopted(&status(Some(new.interception())), &new).unwrap();
        let refused = adopted(&status(Some(old.interception())), &new).unwrap_err().to_string();
        assert!(refused.contains("refused its last reload"), "{refused}");
        // An older service does not tell.
        adopted(&status(None), &new).unwrap();
        let mut other_ports = settings("intercept = \"60000-60001\"\n");
        other_ports.config.intercept_stopped = Policy::Refuse;
        assert_ne!(new.interception(), other_ports.interception());
        // The doors would reset the connections of a user whom the service does not know.
        let mut config = new.config.clone();
        config.allow_users.push("107".into());
        let other_users = Settings::given(config, "a".into()).unwrap();
        adopted(&status(Some(new.interception())), &other_users).unwrap_err();
    }

    /// The old rules would lead to doors that are closed by then.
    #[test]
    fn interception_that_was_taken_out_waits_for_the_service_to_adopt_that() {
        let folder = tempfile::tempdir().unwrap();
        let (old, new) = (settings("intercept = \"60000-60001\"\n"), settings(""));
        let told = [old.interception(), new.interception()];
        let asked = AtomicUsize::new(0);
        let listening = UnixAddress::from(status::socket(folder.path())).listen().unwrap();
        let listener = listening.listener.try_clone().unwrap();
        let service = control::start(listener, move |_| {
            let nth = asked.fetch_add(1, Ordering::Relaxed).min(1);
            let intercept = Some(told[nth].clone());
            serde_json::to_string(&HostStatus { intercept, ..HostStatus::default() }).ok()
        })
        .unwrap();
        let run_dir = Some(folder.path().to_owned());
        let args = ServiceArgs { config: "/no/such/file".into(), name: None, run_dir };
        wait_for_adoption(&args, &new).unwrap();
        drop((service, listening));
        // Nothing is waited for where no service runs.
        wait_for_adoption(&args, &old).unwrap();
    }
}
