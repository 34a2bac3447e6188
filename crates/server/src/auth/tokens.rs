//! Static tokens: a fixed list in the configuration.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::future;
use std::time::Duration;

use ring::digest::{SHA256, digest};
use serde_json::{Map, Value as Json};

use super::credential::{Credential, NoRandomness};
use super::{Session, TokenValidator, Validation};

/// A fixed list of tokens and their users.
///
/// A token is given in plain text, or as `sha256:` followed by its SHA-256 in 64 hexadecimal digits, so that a reader of the list
/// cannot log in. Tokens are stored and looked up by an HMAC under a random key, so that neither the timing of a lookup nor the memory
/// of the process reveals a token.
pub struct StaticTokens {
    tokens: HashMap<Credential, TokenEntry>,
    /// The credentials of the sessions of these tokens.
    credentials: HashSet<Credential>,
}

struct TokenEntry {
    user: StaticToken,
    /// The credential of its sessions, derived from the token and all its settings.
    credential: Credential,
}

/// The prefix of a token that is given by its SHA-256.
const SHA256_PREFIX: &str = "sha256:";

/// The user of a static token.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct StaticToken {
    /// The user id.
    pub user_id: String,
    /// The roles of the user. Default: none, because access is granted explicitly.
    pub roles: Vec<String>,
    /// Further attributes of the user, for row filters. Default: none.
    pub metadata: Map<String, Json>,
    /// When the token expires. Default: never, because a static token is revoked by removing it.
    pub expiry: TokenExpiry,
}

/// When a static token expires.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum TokenExpiry {
    /// Never.
    #[default]
    Never,
    /// At this time, in milliseconds since 1970.
    At(u64),
    /// Sessions expire this long after their login. The token itself remains valid for later logins.
    After(Duration),
}

/// Why a list of tokens is invalid. The messages include users but never tokens.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StaticTokensError {
    /// A token is the empty string.
    #[error("the token of {user_id:?} is empty")]
    EmptyToken {
        /// The user of the token.
        user_id: String,
    },
    /// A token starts with `sha256:` but is not a SHA-256.
    #[error(
        "invalid SHA-256 for the token of {user_id:?}: expected 64 hexadecimal digits after `sha256:`; create them with `printf %s TOKEN | sha256sum`"
    )]
    NotSha256 {
        /// The user of the token.
        user_id: String,
    },
    /// A token has no user id.
    #[error("token {number} of the list has no user id")]
    NoUser {
        /// The one-based number of the token.
        number: usize,
    },
    /// Two users have the same token.
    #[error("{user_id:?} and {other:?} have the same token; each user needs a different one")]
    Duplicate {
        /// The user of the later token.
        user_id: String,
        /// The user of the earlier token.
        other: String,
    },
    /// The system failed to provide random numbers for the key.
    #[error("the random number generator of the system failed")]
    NoRandomness,
}

impl StaticTokens {
    /// Creates a list from pairs of token and user.
    pub fn new(tokens: impl IntoIterator<Item = (impl AsRef<str>, StaticToken)>) -> Result<Self, StaticTokensError> {
        let mut list = Self { tokens: HashMap::new(), credentials: HashSet::new() };
        for (index, (text, user)) in tokens.into_iter().enumerate() {
            if user.user_id.is_empty() {
                return Err(StaticTokensError::NoUser { number: index + 1 });
            }
            if text.as_ref().is_empty() {
                return Err(StaticTokensError::EmptyToken { user_id: user.user_id });
            }
            let Some(digest) = digest_of(text.as_ref()) else {
                return Err(StaticTokensError::NotSha256 { user_id: user.user_id });
            };
            let credential = Credential::of(&[&digest, format!("{user:?}").as_bytes()])?;
            match list.tokens.entry(Credential::of(&[&digest])?) {
                Entry::Vacant(entry) => drop(entry.insert(TokenEntry { user, credential })),
                Entry::Occupied(entry) => {
                    return Err(StaticTokensError::Duplicate {
                        user_id: user.user_id,
                        other: entry.get().user.user_id.clone(),
                    });
                }
            }
            list.credentials.insert(credential);
        }
        Ok(list)
    }

    fn session(&self, token: &str, now: u64) -> Option<Session> {
        let TokenEntry { user, credential } = self.tokens.get(&Credential::of(&[&sha256(token)]).ok()?)?;
        let session = Session { credential: Some(*credential), ..user.session(now) };
        (!session.is_expired(now)).then_some(session)
    }
}

impl From<NoRandomness> for StaticTokensError {
    fn from(NoRandomness: NoRandomness) -> Self {
        Self::NoRandomness
    }
}

fn sha256(token: &str) -> [u8; 32] {
    let mut hash = [0; 32];
    hash.copy_from_slice(digest(&SHA256, token.as_bytes()).as_ref());
    hash
}

/// Returns the SHA-256 of a listed token; `None` if it has the prefix `sha256:` but is invalid.
pub(crate) fn digest_of(token: &str) -> Option<[u8; 32]> {
    let Some(hex) = token.strip_prefix(SHA256_PREFIX) else { return Some(sha256(token)) };
    let digits: Option<Vec<u8>> = hex.chars().map(|digit| digit.to_digit(16)?.try_into().ok()).collect();
    let digits: [u8; 64] = digits?.try_into().ok()?;
    let mut hash = [0; 32];
    for (byte, pair) in hash.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    Some(hash)
}

/// Returns whether a listed token is given by its SHA-256.
pub(crate) fn is_sha256(token: &str) -> bool {
    token.starts_with(SHA256_PREFIX)
}

impl TokenValidator for StaticTokens {
    fn validate<'a>(&'a self, token: &'a str, now: u64) -> Validation<'a> {
        Box::pin(future::ready(Ok(self.session(token, now))))
    }

    fn still_accepts(&self, session: &Session) -> bool {
        session.credential.is_none_or(|credential| self.credentials.contains(&credential))
    }
}

impl fmt::Debug for StaticTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StaticTokens").field("count", &self.tokens.len()).finish_non_exhaustive()
    }
}

impl StaticToken {
    /// Creates a token without metadata that never expires.
    pub fn new(user_id: impl Into<String>, roles: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let roles = roles.into_iter().map(Into::into).collect();
        Self { user_id: user_id.into(), roles, metadata: Map::new(), expiry: TokenExpiry::Never }
    }

    /// Sets [`metadata`](#structfield.metadata).
    #[must_use]
    pub fn metadata(mut self, metadata: Map<String, Json>) -> Self {
        self.metadata = metadata;
        self
    }

    /// Sets [`expiry`](#structfield.expiry).
    #[must_use]
    pub fn expiry(mut self, expiry: TokenExpiry) -> Self {
        self.expiry = expiry;
        self
    }

    fn session(&self, now: u64) -> Session {
        let mut session = Session::new(&self.user_id, &self.roles).metadata(self.metadata.clone());
        session.expires_at = match self.expiry {
            TokenExpiry::Never => None,
            TokenExpiry::At(time) => Some(time),
            TokenExpiry::After(duration) => {
                Some(now.saturating_add(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)))
            }
        };
        session
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn token(user_id: &str, expiry: TokenExpiry) -> StaticToken {
        StaticToken::new(user_id, ["writer"]).metadata(Map::from_iter([("team".to_owned(), json!(7))])).expiry(expiry)
    }

    #[test]
    fn token_identifies_its_user() {
        let tokens = StaticTokens::new([
            ("t-ann", token("ann", TokenExpiry::Never)),
            ("t-bob", token("bob", TokenExpiry::Never)),
        ]);
        let tokens = tokens.unwrap();
        let session = tokens.session("t-bob", 5).unwrap();
        assert_eq!(
            (&*session.user_id, &session.roles[..], session.expires_at),
            ("bob", &["writer".to_owned()][..], None)
        );
        assert_eq!(session.metadata["team"], 7);
        assert_eq!(tokens.session("t-ann", 5).unwrap().user_id, "ann");
        for unknown in ["", "t-bo", "t-bob ", "T-BOB", "bob"] {
            assert_eq!(tokens.session(unknown, 5), None, "{unknown:?}");
        }
    }

    #[test]
    fn token_expires_at_its_time() {
        let tokens = StaticTokens::new([("t", token("ann", TokenExpiry::At(1000)))]).unwrap();
        assert_eq!(tokens.session("t", 999).unwrap().expires_at, Some(1000));
        assert_eq!(tokens.session("t", 1000), None);
    }

    #[test]
    fn relative_expiry_starts_at_each_login() {
        let expiry = TokenExpiry::After(Duration::from_secs(1));
        let tokens = StaticTokens::new([("t", token("ann", expiry))]).unwrap();
        for now in [0, 500, 5000] {
            assert_eq!(tokens.session("t", now).unwrap().expires_at, Some(now + 1000));
        }
        assert_eq!(tokens.session("t", u64::MAX - 1).unwrap().expires_at, Some(u64::MAX));
        let tokens = StaticTokens::new([("t", token("ann", TokenExpiry::After(Duration::ZERO)))]).unwrap();
        assert_eq!(tokens.session("t", 5), None);
    }

    #[test]
    fn errors_include_users_but_no_tokens() {
        let one = |user_id: &str| token(user_id, TokenExpiry::Never);
        for (tokens, error) in [
            (vec![("", one("ann"))], "the token of \"ann\" is empty"),
            (vec![("t-a", one("ann")), ("t-b", one(""))], "token 2 of the list has no user id"),
            (
                vec![("t-a", one("ann")), ("t-a", one("bob"))],
                "\"bob\" and \"ann\" have the same token; each user needs a different one",
            ),
        ] {
            assert_eq!(StaticTokens::new(tokens).unwrap_err().to_string(), error);
        }
        let debug = format!("{:?}", StaticTokens::new([("t-secret", one("ann"))]).unwrap());
        assert!(!debug.contains("secret"), "{debug}");
    }

    /// `printf %s t-bob | sha256sum`
    const T_BOB: &str = "sha256:163ed35a3b77f52fb74c241b2b0ecf3930aac9b7b1533e268bb9e611a5e433d0";

    #[test]
    fn token_may_be_given_by_its_sha256() {
        for text in [T_BOB.to_owned(), T_BOB.to_uppercase().replace("SHA256", "sha256")] {
            let tokens = StaticTokens::new([(text, token("bob", TokenExpiry::Never))]).unwrap();
            assert_eq!(tokens.session("t-bob", 5).unwrap().user_id, "bob");
            for other in [T_BOB, &T_BOB[7..], "t-bo", ""] {
                assert_eq!(tokens.session(other, 5), None, "{other:?}");
            }
        }
        let both = [("t-bob", token("bob", TokenExpiry::Never)), (T_BOB, token("ann", TokenExpiry::Never))];
        assert!(matches!(StaticTokens::new(both), Err(StaticTokensError::Duplicate { .. })));
        for wrong in ["sha256:", &T_BOB[..70], &format!("{T_BOB}0"), &T_BOB.replace('c', "g"), "sha256:é"] {
            let error = StaticTokens::new([(wrong, token("ann", TokenExpiry::Never))]).unwrap_err().to_string();
            assert!(error.starts_with("invalid SHA-256 for the token of \"ann\": expected 64 hex"), "{error}");
        }
    }

    #[test]
    fn session_is_accepted_while_its_token_is_unchanged() {
        let list = |text: &str, token: StaticToken| StaticTokens::new([(text, token)]).unwrap();
        let bob = || token("bob", TokenExpiry::Never);
        let session = list("t-bob", bob()).session("t-bob", 5).unwrap();
        assert!(list("t-bob", bob()).still_accepts(&session) && list(T_BOB, bob()).still_accepts(&session));
        assert!(!list("t-new", bob()).still_accepts(&session), "another token of the same user");
        assert!(!list("t-bob", token("ann", TokenExpiry::Never)).still_accepts(&session));
        assert!(!list("t-bob", token("bob", TokenExpiry::At(9))).still_accepts(&session));
        assert!(!list("t-bob", StaticToken::new("bob", ["reader"])).still_accepts(&session));
        // A session created by the embedding program does not depend on the list.
        assert!(list("t-new", bob()).still_accepts(&Session::new("bob", ["writer"])));
    }
}
