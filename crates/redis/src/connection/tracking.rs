//! Makes the server track the keys that a connection reads.

use super::transport::{ConnectError, Established};
use crate::{ErrorCode, ServerError};

impl Established {
    /// Turns tracking on, for the commands that follow `CLIENT CACHING YES`. A server that refuses it is used without.
    pub(super) async fn track(&mut self) -> Result<(), ConnectError> {
        self.tracked = Some(if self.is_resp3 { self.request_tracking().await? } else { Err(no_resp3()) });
        Ok(())
    }

    async fn request_tracking(&mut self) -> Result<Result<(), ServerError>, ConnectError> {
        // The second command shows that it is permitted as well. A read that follows is tracked, which does no harm.
        for command in [&["CLIENT", "TRACKING", "ON", "OPTIN"][..], &["CLIENT", "CACHING", "YES"]] {
            if let Err(error) = self.call(command).await? {
                return Ok(Err(error));
            }
        }
        Ok(Ok(()))
    }
}

/// What the server said about `HELLO 3`.
fn no_resp3() -> ServerError {
    ServerError { code: ErrorCode::NoProtocol, message: "the server does not support RESP3".into() }
}
