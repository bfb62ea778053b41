//! `platen host init`: makes a CA, and the key and certificate of its own host where the service
//! reads them. Other hosts then join by `platen host add` (module `enrol`).

use super::enrol::{check_writable, names_of, refuse_existing, store};
use super::settings;
use crate::say::{printable, show};
use ::enrol::Joined;
use anyhow::{ensure, Context};
use clap::Args;
use host::DEFAULT_CONFIG;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tls::{Authority, CA_FILE, CERT_FILE, KEY_FILE};

/// Arguments of `platen host init`.
#[derive(Args)]
pub(super) struct InitArgs {
    /// Folder of the CA, which is made unless it is there
    #[arg(long, value_name = "DIR", default_value = "platen-ca")]
    dir: PathBuf,
    /// Configuration, which names this host
    #[arg(long, value_name = "FILE", default_value = DEFAULT_CONFIG)]
    config: PathBuf,
    /// Name of this host in the configuration [default: the host name]
    #[arg(long)]
    name: Option<String>,
    /// Days for which the certificate is valid, 1 to 3650
    #[arg(long, default_value_t = 825, value_parser = clap::value_parser!(u32).range(1..=3650))]
    days: u32,
}

pub(super) fn run(args: &InitArgs) -> anyhow::Result<ExitCode> {
    let config = settings::read(&args.config)?;
    let name = args.name.clone().unwrap_or_else(settings::host_name);
    let me = config.find(&name).with_context(|| args.config.display().to_string())?;
    refuse_existing(&config.tls_dir, "`platen cert issue --force` renews a certificate")?;
    check_writable(&config.tls_dir)?;
    let names = names_of(me);
    let own = args.dir.join(&me.name);
    ensure!(
        !own.exists(),
        "{} has this host's files: install them in {}, or remove the folder",
        own.display(),
        config.tls_dir.display()
    );
    let authority = Authority::at(&args.dir);
    if !args.dir.join(CA_FILE).exists() {
        authority.init(false)?;
    }
    let issued = authority.issue(&names, args.days, false)?;
    let file = |name: &str| {
        let path = issued.dir.join(name);
        fs::read_to_string(&path).with_context(|| path.display().to_string())
    };
    let made = || -> anyhow::Result<Joined> {
        let (key, certificate, authority) = (file(KEY_FILE)?, file(CERT_FILE)?, file(CA_FILE)?);
        Ok(Joined { names: names.clone(), key, certificate, authority, configuration: None })
    };
    let made = made();
    // The key is in one place only. After a failure this command can be run again.
    fs::remove_dir_all(&issued.dir).with_context(|| issued.dir.display().to_string())?;
    store(&made?, &config.tls_dir)?;
    show(&said(&names, &args.dir, &config.tls_dir, &issued.fingerprint.to_string()))?;
    Ok(ExitCode::SUCCESS)
}

fn said(names: &[String], dir: &Path, tls_dir: &Path, fingerprint: &str) -> String {
    let (dir, tls_dir) = (dir.display(), tls_dir.display());
    format!(
        "The CA is in {dir}. Whoever has {dir}/ca-key.pem can deliver VMs to your hosts and take \
         theirs:\nkeep the folder on this host, for root alone.\nThis host has a certificate for \
         {}, in {tls_dir}. Its fingerprint, with which `revoked` of platen.toml excludes it (also \
         in {dir}/issued):\n  {fingerprint}\nNext: platen host add NAME, for each other host; \
         platen host doors on --restart;\nsystemctl enable --now platen; platen doctor\n",
        printable(&names.join(", ")),
    )
}
