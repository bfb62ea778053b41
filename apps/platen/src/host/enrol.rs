//! `platen host add` and `platen host join`, by which another host gets its certificate and the
//! configuration.

use super::configure::configure;
use super::settings;
use crate::network;
use crate::say::{printable, say, show};
use ::enrol::{Joined, Offer, Token};
use anyhow::{anyhow, bail, ensure, Context};
use clap::Args;
use host::{HostEntry, HostError, DEFAULT_CONFIG};
use nix::unistd::{chown, User};
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{BufRead, IsTerminal, Read, Write};
use std::net::Ipv6Addr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tls::{Authority, Credentials, CA_FILE, CERT_FILE, DEFAULT_DIR, KEY_FILE};

/// The user of the service, as the package makes it.
const SERVICE_USER: &str = "platen";

/// Arguments of `platen host add`.
#[derive(Args)]
pub(super) struct AddArgs {
    /// Name of the new host in the configuration of this host
    #[arg(value_name = "NAME")]
    name: String,
    /// Folder of the CA, which `platen host init` or `platen cert init` makes
    #[arg(long, value_name = "DIR", default_value = "platen-ca")]
    dir: PathBuf,
    /// Configuration, which the new host gets
    #[arg(long, value_name = "FILE", default_value = DEFAULT_CONFIG)]
    config: PathBuf,
    /// Log in there by ssh and run `platen host join`, instead of printing the command
    #[arg(long, value_name = "USER@HOST")]
    ssh: Option<String>,
    /// Name or address at which the new host reaches this one [default: the host name]
    #[arg(long, value_name = "HOST")]
    address: Option<String>,
    /// TCP port on which this waits for the new host, 1 to 65535
    #[arg(long, default_value_t = 4445, value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// Minutes for which the token is valid, 1 to 1440
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u64).range(1..=1440))]
    minutes: u64,
    /// Days for which the certificate is valid, 1 to 3650
    #[arg(long, default_value_t = 825, value_parser = clap::value_parser!(u32).range(1..=3650))]
    days: u32,
}

/// Arguments of `platen host join`.
#[derive(Args)]
pub(super) struct JoinArgs {
    /// Address at which `platen host add` waits
    #[arg(value_name = "HOST:PORT")]
    address: String,
    /// Token of `platen host add`; - reads a line from standard input. Every user of this host can
    /// read an argument
    #[arg(value_name = "TOKEN", default_value = "-")]
    token: String,
    /// Folder for this host's ca.pem, cert.pem and key.pem
    #[arg(long, value_name = "DIR", default_value = DEFAULT_DIR)]
    tls_dir: PathBuf,
    /// Configuration, written if there is none with hosts yet
    #[arg(long, value_name = "FILE", default_value = DEFAULT_CONFIG)]
    config: PathBuf,
    /// Replace an existing key and certificate
    #[arg(long)]
    force: bool,
}

/// Runs `platen host add`.
pub(super) fn add(args: &AddArgs) -> anyhow::Result<ExitCode> {
    let config = settings::read(&args.config)?;
    let host = config.find(&args.name).map_err(|error| match error {
        HostError::Unknown { known, .. } => anyhow!(
            "{}: no [[host]] has the name '{}'; there are: {known}. Add it, also on the other hosts",
            args.config.display(),
            printable(&args.name)
        ),
        other => other.into(),
    })?;
    ensure!(
        host.name == args.name,
        "{} is '{}' in {}: give that name",
        printable(&args.name),
        host.name,
        args.config.display()
    );
    let names = names_of(host);
    let text = fs::read_to_string(&args.config)?;
    let listener = network::bind(&network::all_at(args.port))
        .with_context(|| format!("cannot listen on port {} for the new host", args.port))?;
    let valid = Duration::from_secs(60 * args.minutes);
    let authority = Authority::at(&args.dir);
    let offer = Offer::new(authority, names, args.days, Some(text), listener, valid)?;
    let address = args.address.clone().unwrap_or_else(settings::host_name);
    let address = match address.parse::<Ipv6Addr>() {
        Ok(address) => format!("[{address}]:{}", args.port),
        Err(_) => format!("{address}:{}", args.port),
    };
    match &args.ssh {
        None => {
            show(&format!(
                "On {}, within {} minutes, as root:\n  platen host join {address}\nIt asks for this \
                 token:\n  {}\n",
                printable(&args.name),
                args.minutes,
                offer.token()
            ))?;
            offer.wait(say)?;
        }
        Some(to) => by_ssh(&offer, to, &address)?,
    }
    let number = offer.issued().map_or_else(String::new, |number| number.to_string());
    show(&format!(
        "{} has joined\nThe fingerprint of its certificate, with which `revoked` of platen.toml excludes it \
         (also in {}):\n  {number}\n",
        printable(&args.name),
        args.dir.join("issued").display()
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// The names in the certificate of a host.
pub(super) fn names_of(host: &HostEntry) -> Vec<String> {
    let mut names = vec![host.name.clone()];
    names.extend(host.address.clone().filter(|address| *address != host.name));
    names
}

/// Refuses to replace a host's key and certificates.
pub(super) fn refuse_existing(dir: &Path, remedy: &str) -> anyhow::Result<()> {
    let mut files = [KEY_FILE, CERT_FILE, CA_FILE].map(|name| dir.join(name)).into_iter();
    match files.find(|path| path.exists()) {
        Some(there) => bail!("{} exists: {remedy}", there.display()),
        None => Ok(()),
    }
}

/// Checks that files can be written in this folder, or that it can be made.
pub(super) fn check_writable(dir: &Path) -> anyhow::Result<()> {
    let place = dir.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("."));
    tempfile::tempfile_in(place).with_context(|| format!("cannot write to {}", place.display()))?;
    Ok(())
}

/// Runs `platen host join` on the new host. The token goes through its standard input, where no
/// list of processes shows it.
fn by_ssh(offer: &Offer, to: &str, address: &str) -> anyhow::Result<()> {
    ensure!(!to.starts_with('-'), "--ssh: '{to}' is no USER@HOST");
    // The shell of the new host takes the address as it is.
    let plain = |c: char| c.is_ascii_alphanumeric() || ".:-_[]".contains(c);
    ensure!(address.chars().all(plain), "--address: '{address}' is no name or address of a host");
    let ssh = Command::new("ssh")
        .args([to, "--", "platen", "host", "join", address, "-"])
        .stdin(Stdio::piped())
        .spawn()
        .context("cannot run ssh")?;
    // The wait below checks ssh meanwhile.
    let ssh = Mutex::new(ssh);
    let there = || ssh.lock().unwrap_or_else(PoisonError::into_inner);
    let mut input = there().stdin.take().context("ssh has no standard input")?;
    let written = input.write_all(format!("{}\n", offer.token()).as_bytes());
    drop(input);
    // An ssh that has failed is not waited for.
    let waited = offer.wait_while(|| matches!(there().try_wait(), Ok(None)), say);
    if waited.is_err() {
        // The offer is over, and ssh may wait for a password for ever.
        let _ = there().kill();
    }
    let status = there().wait().context("ssh")?;
    if let Err(error) = waited {
        return Err(error).with_context(|| format!("`platen host join` on {to}: ssh: {status}"));
    }
    ensure!(status.success(), "`platen host join` on {to} by ssh failed: {status}");
    written.context("ssh does not take the token")?;
    ensure!(waited?, "{to} has not joined");
    Ok(())
}

/// Runs `platen host join`.
pub(super) fn join(args: &JoinArgs) -> anyhow::Result<ExitCode> {
    let token = match args.token.as_str() {
        "-" => {
            if std::io::stdin().is_terminal() {
                say("paste the token, then press Enter");
            }
            let mut text = String::new();
            std::io::stdin().lock().take(1024).read_line(&mut text).context("standard input")?;
            text
        }
        given => given.to_owned(),
    };
    let token: Token = token.trim().parse()?;
    if !args.force {
        refuse_existing(&args.tls_dir, "--force replaces key and certificate")?;
    }
    // The token is spent with the answer.
    check_writable(&args.tls_dir)?;
    let (joined, reply) = ::enrol::join(&args.address, &token)?;
    let written = write(&joined, args);
    let told = match &written {
        Ok(_) => reply.written(),
        Err(error) => reply.failed(&format!("{error:#}")),
    };
    let kept = written?;
    if let Err(error) = told {
        say(&format!(
            "the host of the CA has not heard that this host has joined: {:#}. Nothing is left to do",
            anyhow::Error::from(error)
        ));
    }
    show(&format!(
        "This host has a certificate for {}, in {}. {kept}\nNext: platen host doors on --restart; \
         systemctl enable --now platen; platen doctor\n",
        printable(&joined.names.join(", ")),
        args.tls_dir.display(),
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the configuration first and then the key and the certificates: without the latter, a
/// second attempt needs no --force. Returns a sentence on the configuration.
fn write(joined: &Joined, args: &JoinArgs) -> anyhow::Result<String> {
    let kept = configure(joined.configuration.as_deref(), &args.config)?;
    store(joined, &args.tls_dir)?;
    Ok(kept)
}

/// Writes key and certificates, all of them or none, readable for the service's user.
pub(super) fn store(joined: &Joined, dir: &Path) -> anyhow::Result<()> {
    let owner = match rustix::process::geteuid().is_root() {
        true => User::from_name(SERVICE_USER).ok().flatten(),
        false => None,
    };
    let is_new = !dir.exists();
    DirBuilder::new()
        .recursive(true)
        .mode(0o750)
        .create(dir)
        .with_context(|| format!("cannot make {}", dir.display()))?;
    if let (true, Some(owner)) = (is_new, &owner) {
        chown(dir, None, Some(owner.gid))?;
        fs::set_permissions(dir, Permissions::from_mode(0o750))?;
    }
    let mode = if owner.is_some() { 0o640 } else { 0o600 };
    let texts =
        [(KEY_FILE, &joined.key), (CERT_FILE, &joined.certificate), (CA_FILE, &joined.authority)];
    let fresh = |name: &str| dir.join(format!("{name}.new"));
    let written = texts.iter().try_for_each(|(name, text)| -> anyhow::Result<()> {
        let path = fresh(name);
        // A run that was killed may have left it.
        let _ = fs::remove_file(&path);
        let open = File::options().write(true).create_new(true).mode(mode).open(&path);
        let mut file = open.with_context(|| format!("cannot write {}", path.display()))?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        if let Some(owner) = &owner {
            chown(&path, None, Some(owner.gid))?;
        }
        // Whatever the umask is.
        file.set_permissions(Permissions::from_mode(mode))?;
        Ok(())
    });
    let checked = written.and_then(|()| {
        let files = [CA_FILE, CERT_FILE, KEY_FILE].map(fresh);
        let credentials = Credentials::load(&files[0], &files[1], &files[2])?;
        credentials.valid_until()?;
        credentials.check_dates().context("look at the clocks of both hosts")
    });
    if let Err(error) = checked {
        texts.iter().for_each(|(name, _)| drop(fs::remove_file(fresh(name))));
        return Err(error.context("the new certificate cannot be used"));
    }
    for (name, _) in texts {
        let path = dir.join(name);
        fs::rename(fresh(name), &path)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
