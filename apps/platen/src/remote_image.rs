//! Images of another host: `platen://HOST:PORT/NAME` in place of a path.

use crate::network;
use crate::relay_options::TlsOptions;
use crate::say::{printable, say};
use anyhow::{bail, Context};
use clap::Args;
use image::{pack_name, HotSet, Image, ImageFile};
use remote::{Client, Lock, RemoteError, Status};
use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Longest waits for a server: for the first connection, and for one in the place of a lost one.
const WAITS: [Duration; 2] = [Duration::from_secs(10), Duration::from_secs(600)];

/// How another host's images are reached.
#[derive(Args, Debug)]
pub(crate) struct RemoteOptions {
    /// Name in the certificate of the host that serves the images [default: the HOST of the image]
    #[arg(long, value_name = "NAME")]
    peer_name: Option<String>,
    #[command(flatten)]
    tls: TlsOptions,
}

impl RemoteOptions {
    /// The arguments that have the same meaning for the player's process.
    pub(crate) fn to_args(&self) -> Vec<OsString> {
        let mut args: Vec<OsString> = Vec::new();
        if let Some(name) = &self.peer_name {
            args.extend(["--peer-name".into(), name.into()]);
        }
        if self.tls.insecure {
            args.push("--insecure".into());
            return args;
        }
        let (ca, cert, key) = self.tls.paths();
        for (option, path) in [("--tls-ca", ca), ("--tls-cert", cert), ("--tls-key", key)] {
            args.extend([option.into(), path.into()]);
        }
        args
    }
}

/// An open image of another host.
pub(crate) struct Remote {
    pub(crate) image: Arc<Image>,
    client: Client,
    name: String,
    /// The session, hexadecimal. Other processes join it.
    pub(crate) session: String,
}

impl Remote {
    /// Whether this names an image of another host.
    pub(crate) fn is_remote(path: &Path) -> bool {
        path.as_os_str().as_encoded_bytes().starts_with(SCHEME.as_bytes())
    }

    /// Opens and locks the image that `path` names. `session` is that of the process that has
    /// locked it.
    pub(crate) fn open(
        path: &Path,
        shared: bool,
        session: Option<&str>,
        options: &RemoteOptions,
    ) -> anyhow::Result<Self> {
        let (host, name) = parts(path)?;
        let session = match session {
            Some(session) => session.to_owned(),
            None => session::random_id()?,
        };
        let token = u128::from_str_radix(&session, 16).context("the session's number")?;
        let connector = network::connector(&options.tls, host, options.peer_name.as_deref())?;
        let tell = Box::new(|text: &str| say(&printable(text)));
        let client = Client::new(host.into(), connector, token.to_be_bytes(), WAITS, tell);
        let lock = if shared { Lock::Shared } else { Lock::Exclusive };
        let file = client.open_and_keep(name, lock)?;
        let store = name.rsplit_once('/').map_or(String::new(), |(store, _)| format!("{store}/"));
        let mut pack = |id| Ok(client.open(&format!("{store}{}", pack_name(id)), Lock::None)?);
        let image = Image::with_packs(file, &mut pack)
            .with_context(|| format!("image {}", path.display()))?;
        Ok(Self { image: Arc::new(image), client, name: name.into(), session })
    }

    /// The hot set that lies beside the image; an empty one if there is none.
    pub(crate) fn hot_set(&self) -> anyhow::Result<HotSet> {
        let name = HotSet::path(Path::new(&self.name));
        // A path without a folder becomes one in the folder ".".
        let name = name.strip_prefix(".").unwrap_or(&name).to_string_lossy().into_owned();
        let file: ImageFile = match self.client.open(&name, Lock::None) {
            Err(RemoteError::Refused { status: Status::NotFound, .. }) => {
                return Ok(HotSet::default());
            }
            file => file?,
        };
        Ok(HotSet::read_remote(&file, &self.image)?)
    }

    /// Ends this process's use of the image.
    pub(crate) fn end(&self) {
        self.client.end();
    }
}

const SCHEME: &str = "platen://";

/// Splits the path into HOST:PORT and NAME.
fn parts(path: &Path) -> anyhow::Result<(&str, &str)> {
    let text = path.to_str().and_then(|path| path.strip_prefix(SCHEME));
    match text.and_then(|text| text.split_once('/')) {
        Some((host, name)) if !host.is_empty() && !name.is_empty() => Ok((host, name)),
        _ => bail!("image {} is not {SCHEME}HOST:PORT/NAME", printable(&path.to_string_lossy())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn an_image_of_another_host_has_host_port_and_name() {
        let is = |path: &str| Remote::is_remote(Path::new(path));
        assert!(is("platen://b:4445/vm") && !is("/platen://b/vm") && !is("vm"));
        let parts = |path: &str| {
            let path = PathBuf::from(path);
            parts(&path).map(|(host, name)| (host.to_owned(), name.to_owned())).ok()
        };
        let is = |host: &str, name: &str| Some((host.to_owned(), name.to_owned()));
        assert_eq!(parts("platen://b:4445/store/vm"), is("b:4445", "store/vm"));
        assert_eq!(parts("platen://[::1]:1/vm"), is("[::1]:1", "vm"));
        for no in ["platen://b:4445", "platen:///vm", "platen://b:1/"] {
            assert_eq!(parts(no), None, "{no}");
        }
    }
}
